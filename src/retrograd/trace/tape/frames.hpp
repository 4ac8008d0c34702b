// Frames of the calling thread, read without the GIL and without making frame objects of them.
//
// The thread that runs an operator is inside its frames, so that they stand still, and what they hold lives. Where the
// interpreter's layout of frames is not one of those below, its public functions are called, with the GIL.
#pragma once

#include <Python.h>

#if PY_VERSION_HEX < 0x030E0000 && !defined(RETROGRAD_FRAME_OBJECTS)
#undef _PyGC_FINALIZED  // the headers of 3.12 define it twice
#define Py_BUILD_CORE 1
#define Py_BUILD_CORE_MODULE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#undef Py_BUILD_CORE_MODULE

namespace frames {

// What frames are read under: nothing.
struct Hold {};

struct Frame {
  _PyInterpreterFrame* at;

  PyCodeObject* code() const {
#if PY_VERSION_HEX >= 0x030D0000
    return reinterpret_cast<PyCodeObject*>(at->f_executable);
#else
    return at->f_code;
#endif
  }
  // In bytes, as the table of lines counts.
  int instruction() const {
#if PY_VERSION_HEX >= 0x030D0000
    const auto* now = at->instr_ptr;
#else
    const auto* now = at->prev_instr;
#endif
    return static_cast<int>((now - _PyCode_CODE(code())) * sizeof(_Py_CODEUNIT));
  }
  // The first argument, borrowed.
  PyObject* self() const {
    auto* first = at->localsplus[0];
    return first && PyCell_Check(first) ? PyCell_GET(first) : first;
  }
};

// Calls `each` with the frames of this thread, innermost first, until it returns false.
template <class Each> void walk(const Each& each) {
  auto* thread = PyGILState_GetThisThreadState();
  if (!thread) return;
#if PY_VERSION_HEX >= 0x030D0000
  auto* at = thread->current_frame;
#else
  auto* at = thread->cframe->current_frame;
#endif
  for (; at; at = at->previous) {
#if PY_VERSION_HEX >= 0x030C0000
    if (at->owner == FRAME_OWNED_BY_CSTACK) continue;  // stands between C and Python, and has no code
#endif
    if (!each(Frame{at})) return;
  }
}

}  // namespace frames

#else

namespace frames {

struct Hold {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Hold() { PyGILState_Release(state); }
};

struct Frame {
  PyFrameObject* at;

  PyCodeObject* code() const {
    auto* code = PyFrame_GetCode(at);
    Py_DECREF(code);  // the frame holds it
    return code;
  }
  int instruction() const { return PyFrame_GetLasti(at); }
  PyObject* self() const {
#if PY_VERSION_HEX >= 0x030C0000
    auto* self = PyFrame_GetVarString(at, "self");
    Py_XDECREF(self);  // the frame holds it
#else
    auto* locals = PyFrame_GetLocals(at);
    auto* self = PyDict_GetItemString(locals, "self");
    Py_DECREF(locals);
#endif
    return self;
  }
};

template <class Each> void walk(const Each& each) {
  auto* at = PyEval_GetFrame();
  Py_XINCREF(at);
  while (at && each(Frame{at})) {
    auto* above = PyFrame_GetBack(at);
    Py_DECREF(at);
    at = above;
  }
  Py_XDECREF(at);
}

}  // namespace frames

#endif
