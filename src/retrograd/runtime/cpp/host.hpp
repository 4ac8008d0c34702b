// What the C++ paths of eager ops share: launches of kernels that are compiled already, when they fit, allocations, and
// what Python tells of them. Knows no formula and no op: a source that includes this has the arguments and the node.
//
// Fits torch 2.11 to 2.15. No CUDA headers: the driver's functions are looked up in libcuda.so.1.

#pragma once

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SequenceNumber.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using at::ScalarType;
using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePtr = decltype(std::declval<Node&>().getptr());
using Shape = c10::SmallVector<int64_t, 8>;

// ---- What is launched ----------------------------------------------------------------------------------------------

struct Param {
  int slot;        // which tensor's address is passed; -1: the value
  uint64_t value;  // the argument's bytes, the lowest first
};

struct Launch {
  void* function = nullptr;
  unsigned grid[3] = {0, 0, 0};
  unsigned threads = 0;
  unsigned shared = 0;
  std::vector<Param> params;
  bool pdl = false;  // begins while the kernel ahead of it ends
  // Where a kernel takes one struct instead: its bytes, and at which of them the addresses of which tensors stand.
  std::string block;
  std::vector<std::pair<size_t, int>> addresses;
};

struct Buffer {
  int slot;
  ScalarType dtype;
  Shape shape;
  bool zeros;  // filled with them, else not at all
};

struct Recipe {
  std::vector<Launch> launches;  // in their order
  std::vector<Buffer> buffers;   // what is allocated for them beside the results
};

// Numbers that say what a recipe was recorded for.
struct Key {
  static constexpr int kMost = 96;
  int length = 0;
  std::array<int64_t, kMost> words;

  Key() {}  // leaves the words as they are
  explicit Key(std::string_view bytes) {
    TORCH_CHECK(bytes.size() <= sizeof words, "a key has at most ", kMost, " words");
    length = static_cast<int>(bytes.size() / sizeof(int64_t));
    std::memcpy(words.data(), bytes.data(), bytes.size());
  }
  std::string_view bytes() const {
    return {reinterpret_cast<const char*>(words.data()), length * sizeof(int64_t)};
  }
  void add(int64_t word) { words[length++] = word; }
  void add_bits(double number) {
    int64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    add(bits);
  }
  bool operator==(const Key& other) const {
    return length == other.length && std::memcmp(words.data(), other.words.data(), length * sizeof(int64_t)) == 0;
  }
};

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t mixed = key.length;
    for (int i = 0; i < key.length; ++i) {
      mixed = (mixed ^ static_cast<uint64_t>(key.words[i])) * 0x9E3779B97F4A7C15ull;
      mixed ^= mixed >> 29;
    }
    return mixed;
  }
};

class Recipes {
 public:
  std::shared_ptr<const Recipe> find(const Key& key) const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    auto found = held_.find(key);
    return found == held_.end() ? nullptr : found->second;
  }
  void add(const Key& key, Recipe recipe) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    if (held_.size() >= 4096) held_.clear();
    held_[key] = std::make_shared<const Recipe>(std::move(recipe));
  }
  void clear() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    held_.clear();
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<Key, std::shared_ptr<const Recipe>, Hash> held_;
};

// ---- The driver ----------------------------------------------------------------------------------------------------

// As in cuda.h of CUDA 12.0, which later versions only add to.
struct LaunchAttribute {
  int id;
  char pad[4];
  unsigned value[16];  // a union of 64 bytes
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
constexpr int kProgrammaticStreamSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
using LaunchFn = int (*)(const LaunchConfig* config, void* function, void** params, void** extra);
using ContextFn = int (*)(void** context);
using RetainFn = int (*)(void** context, int device);
using SetFn = int (*)(void* context);
using StreamFn = void* (*)(const c10::Stream* stream);
using FillFn = int (*)(uint64_t address, unsigned char byte, size_t count, void* stream);

// c10::Stream::native_handle, from torch 2.11 or 2.12 on.
template <class S, class = void>
struct Handles {
  static constexpr bool known = false;
  static void* of(const S*) { return nullptr; }
};
template <class S>
struct Handles<S, std::void_t<decltype(std::declval<const S&>().native_handle())>> {
  static constexpr bool known = true;
  static void* of(const S* stream) { return stream->native_handle(); }
};

struct State {
  c10::DeviceType device_type = c10::kCUDA;
  uint64_t allowed_keys = 0;
  LaunchFn launch = nullptr;
  ContextFn context = nullptr;
  RetainFn retain = nullptr;
  SetFn set_context = nullptr;
  StreamFn stream = nullptr;
  FillFn fill = nullptr;
  PyObject* fallback = nullptr;  // a backward that no recipe fits
  PyObject* knobs = nullptr;     // triton.knobs.runtime
  PyObject* hook_name = nullptr;
  PyObject* calls_name = nullptr;
  PyObject* impls = nullptr;     // {what `impl` may be: a number}
  std::string refusal;           // of a second derivative
  Recipes forward, backward;
};

// Never destroyed: threads of the autograd engine may outlive static objects.
State& state() {
  static State* made = new State;
  return *made;
}

// The current stream of a device, whose context is current after it.
void* enter(c10::Device device) {
  State& held = state();
  if (held.context != nullptr) {
    // A thread of the engine has no context before its first call of the runtime.
    void* context = nullptr;
    held.context(&context);
    if (context == nullptr && held.retain(&context, device.index()) == 0) held.set_context(context);
  }
  if (held.stream == nullptr) return nullptr;
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return held.stream(&current);
}

void check(int code, const char* action) {
  if (code != 0) {
    throw std::runtime_error(std::string(action) + " of retrograd was not launched: CUDA driver error " +
                             std::to_string(code));
  }
}

void launch(const Launch& what, uint64_t* slots, c10::Device device) {
  State& held = state();
  void* stream = enter(device);
  constexpr size_t kMost = 64, kMostBytes = 1024;
  void* params[kMost + 2];
  alignas(16) char block[kMostBytes];
  uint64_t scratch = 0;
  size_t count = 0;
  for (const Param& param : what.params) {
    params[count++] = param.slot < 0 ? const_cast<uint64_t*>(&param.value) : &slots[param.slot];
  }
  if (!what.block.empty()) {
    std::memcpy(block, what.block.data(), what.block.size());
    for (const auto& [offset, slot] : what.addresses) std::memcpy(block + offset, &slots[slot], sizeof(uint64_t));
    params[count++] = block;
  }
  params[count++] = &scratch;  // Triton's global scratch
  params[count++] = &scratch;  // and its profiler's
  LaunchAttribute attribute = {kProgrammaticStreamSerialization, {}, {1}};
  const LaunchConfig config = {
      {what.grid[0], what.grid[1], what.grid[2]}, {what.threads, 1, 1}, what.shared, stream, &attribute, what.pdl};
  check(held.launch(&config, what.function, params, nullptr), "a kernel");
}

// ---- What tensors have to be like ----------------------------------------------------------------------------------

uint64_t keys_of(c10::DeviceType type) {
  using K = c10::DispatchKey;
  const bool cuda = type == c10::kCUDA;
  return (c10::DispatchKeySet(cuda ? K::CUDA : K::CPU) | c10::DispatchKeySet(cuda ? K::AutogradCUDA : K::AutogradCPU) |
          c10::DispatchKeySet(cuda ? K::AutocastCUDA : K::AutocastCPU) | c10::DispatchKeySet(K::ADInplaceOrView))
      .raw_repr();
}

// Nobody watches operators in this thread: no mode, no functorch, no tracing.
bool unwatched() {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return (local.included_.raw_repr() & ~c10::default_included_set.raw_repr()) == 0 &&
         !at::impl::torch_function_mode_enabled();
}

// A dense tensor that is nothing more: no subclass, no lazy conjugate, no batch, no tangent. Its address joins `all`.
bool plain(const Tensor& t, c10::Device device, uint64_t& all) {
  if ((t.key_set().raw_repr() & ~state().allowed_keys) != 0 || t.device() != device || t._fw_grad(0).defined()) {
    return false;
  }
  const auto address = reinterpret_cast<uint64_t>(t.const_data_ptr());
  all |= address;
  return address != 0;
}

int64_t head(ScalarType dtype, int64_t dims) { return ((static_cast<int64_t>(dtype) + 1) << 8) | dims; }

uint64_t address(const Tensor& t) { return t.defined() ? reinterpret_cast<uint64_t>(t.const_data_ptr()) : 0; }

// What at::empty allocates by. It cannot be exchanged once it has allocated anything.
c10::Allocator* allocator_of_empty(c10::Device device) {
  return at::empty({1}, at::TensorOptions(at::kByte).device(device)).storage().allocator();
}

c10::Allocator* allocator(c10::Device device) {
  if (device.is_cuda()) {
    static c10::Allocator* const on_gpu = allocator_of_empty(device);
    return on_gpu;
  }
  static c10::Allocator* const on_host = allocator_of_empty(device);
  return on_host;
}

// As at::empty, past the dispatcher: behind another thread, as in a backward, it takes 2 to 4 us of a call. The device
// has to be the current one.
Tensor make(at::IntArrayRef shape, ScalarType dtype, c10::Device device) {
  const c10::DispatchKeySet keys(device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  return at::detail::empty_generic(shape, allocator(device), keys, dtype, std::nullopt);
}

// Two vectors in one allocation, each at a multiple of 16 bytes.
std::pair<Tensor, Tensor> make_two(int64_t count, c10::Device device) {
  const int64_t second = (count + 3) / 4 * 4;
  Tensor whole = make({second + count}, at::kFloat, device);
  auto part = [&](int64_t offset) {
    auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(whole.storage()), whole.key_set(), whole.dtype());
    t.unsafeGetTensorImpl()->set_storage_offset(offset);
    t.unsafeGetTensorImpl()->set_sizes_contiguous({count});
    return t;
  };
  return {part(0), part(second)};
}

Tensor make(const Buffer& buffer, c10::Device device) {
  Tensor made = make(buffer.shape, buffer.dtype, device);
  if (buffer.zeros) check(state().fill(address(made), 0, made.nbytes(), enter(device)), "a filling");
  return made;
}

// ---- Threads and references ----------------------------------------------------------------------------------------

struct WithoutGil {
  PyThreadState* saved = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(saved); }
};

struct WithGil {
  PyGILState_STATE saved = PyGILState_Ensure();
  ~WithGil() { PyGILState_Release(saved); }
};

// Nodes are shared pointers before torch 2.13, intrusive ones from then on.
template <class T>
auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>) {
    return c10::make_intrusive<T>();
  } else {
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  }
}

// ---- What comes from Python and goes there -------------------------------------------------------------------------

py::object wrapped(const Tensor& t) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(t)); }

py::tuple numbers(at::IntArrayRef values) {
  py::tuple all(values.size());
  for (size_t i = 0; i < values.size(); ++i) all[i] = values[i];
  return all;
}

// The four gradients that the backward in Python computes for a node; its exceptions keep their type.
template <class... Args>
variable_list by_python(Args&&... args) {
  py::tuple results;
  try {
    results = py::reinterpret_borrow<py::object>(state().fallback)(std::forward<Args>(args)...);
  } catch (py::error_already_set& error) {
    error.restore();
    python_error raised;
    raised.persist();
    throw std::move(raised);
  }
  variable_list grads(4);
  for (size_t i = 0; i < 4; ++i) {
    PyObject* grad = PyTuple_GetItem(results.ptr(), static_cast<Py_ssize_t>(i));
    if (grad != nullptr && grad != Py_None) grads[i] = THPVariable_Unpack(grad);
  }
  return grads;
}

bool hooked() {
  State& held = state();
  if (held.knobs == nullptr) return false;
  auto hook = py::reinterpret_steal<py::object>(PyObject_GetAttr(held.knobs, held.hook_name));
  if (!hook) throw python_error();
  if (hook.is_none()) return false;
  // From Triton 3.6 on a chain of hooks that may be empty.
  auto calls = py::reinterpret_steal<py::object>(PyObject_GetAttr(hook.ptr(), held.calls_name));
  if (!calls) {
    PyErr_Clear();
    return true;
  }
  const int some = PyObject_IsTrue(calls.ptr());
  if (some < 0) throw python_error();
  return some != 0;
}

bool read_tensor(PyObject* given, const Tensor*& tensor) {
  static const Tensor* none = new Tensor;
  if (given == Py_None) {
    tensor = none;
    return true;
  }
  if (!THPVariable_CheckExact(given)) return false;
  tensor = &THPVariable_Unpack(given);
  return true;
}

bool read_dtype(PyObject* given, std::optional<ScalarType>& dtype) {
  if (given == Py_None) return true;
  if (!THPDtype_Check(given)) return false;
  dtype = reinterpret_cast<THPDtype*>(given)->scalar_type;
  return true;
}

// The number of an implementation, -1 of one that launches nothing from here.
int read_impl(PyObject* impl) {
  PyObject* number = PyDict_GetItemWithError(state().impls, impl);
  if (number == nullptr) {
    PyErr_Clear();  // also of what has no hash
    return -1;
  }
  return static_cast<int>(PyLong_AsLong(number));
}

PyObject* not_implemented() { return Py_NewRef(Py_NotImplemented); }

// Whether tensors on this device can be launched on from this thread.
bool is_current(c10::Device device) {
  return device.type() == state().device_type &&
         (!device.is_cuda() || c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice() == device);
}

ScalarType read_scalar_type(py::handle dtype) {
  TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "expected a torch.dtype");
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

Launch read_launch(py::handle given) {
  const auto fields = given.cast<py::tuple>();
  Launch made;
  made.function = reinterpret_cast<void*>(fields[0].cast<uint64_t>());
  const auto grid = fields[1].cast<py::tuple>();
  for (size_t i = 0; i < 3; ++i) made.grid[i] = grid[i].cast<unsigned>();
  made.threads = fields[2].cast<unsigned>();
  made.shared = fields[3].cast<unsigned>();
  for (py::handle param : fields[4]) {
    const auto pair = param.cast<py::tuple>();
    made.params.push_back({pair[0].cast<int>(), pair[1].cast<uint64_t>()});
  }
  TORCH_CHECK(made.params.size() <= 64, "a kernel has at most 64 arguments here");
  made.pdl = fields[5].cast<bool>();
  made.block = fields[6].cast<std::string>();
  for (py::handle place : fields[7]) {
    const auto pair = place.cast<py::tuple>();
    made.addresses.emplace_back(pair[0].cast<size_t>(), pair[1].cast<int>());
    TORCH_CHECK(made.addresses.back().first + sizeof(uint64_t) <= made.block.size(), "an address is outside");
  }
  TORCH_CHECK(made.block.size() <= 1024, "a kernel's struct has at most 1024 bytes here");
  return made;
}

PyObject* add(PyObject*, PyObject* args) {  // (is_backward, bytes of the key, launches, buffers)
  HANDLE_TH_ERRORS
  const auto given = py::reinterpret_borrow<py::tuple>(args);
  Recipe recipe;
  for (py::handle call : given[2]) recipe.launches.push_back(read_launch(call));
  for (py::handle each : given[3]) {
    const auto fields = each.cast<py::tuple>();
    Buffer buffer{fields[0].cast<int>(), read_scalar_type(fields[1]), {}, fields[3].cast<bool>()};
    for (py::handle size : fields[2]) buffer.shape.push_back(size.cast<int64_t>());
    recipe.buffers.push_back(std::move(buffer));
  }
  Recipes& into = given[0].cast<bool>() ? state().backward : state().forward;
  into.add(Key(given[1].cast<std::string_view>()), std::move(recipe));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* clear(PyObject*, PyObject*) {
  state().forward.clear();
  state().backward.clear();
  Py_RETURN_NONE;
}

PyObject* dtype_code(PyObject*, PyObject* dtype) {
  HANDLE_TH_ERRORS
  return PyLong_FromLong(static_cast<long>(read_scalar_type(dtype)));
  END_HANDLE_TH_ERRORS
}

PyObject* tell(PyObject*, PyObject* args) {  // (fallback, knobs or None, numbers of implementations, refusal)
  HANDLE_TH_ERRORS
  PyObject *fallback, *knobs, *impls;
  const char* message;
  if (!PyArg_ParseTuple(args, "OOO!s", &fallback, &knobs, &PyDict_Type, &impls, &message)) return nullptr;
  State& held = state();
  held.fallback = Py_NewRef(fallback);
  held.knobs = knobs == Py_None ? nullptr : Py_NewRef(knobs);
  held.impls = Py_NewRef(impls);
  held.hook_name = PyUnicode_InternFromString("launch_enter_hook");
  held.calls_name = PyUnicode_InternFromString("calls");
  held.refusal = message;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Launch on the GPU; returns why that is not possible, or None.
PyObject* use_cuda(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  State& held = state();
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver == nullptr) return PyUnicode_FromString("libcuda.so.1 does not load");
  held.launch = reinterpret_cast<LaunchFn>(dlsym(driver, "cuLaunchKernelEx"));
  held.context = reinterpret_cast<ContextFn>(dlsym(driver, "cuCtxGetCurrent"));
  held.retain = reinterpret_cast<RetainFn>(dlsym(driver, "cuDevicePrimaryCtxRetain"));
  held.set_context = reinterpret_cast<SetFn>(dlsym(driver, "cuCtxSetCurrent"));
  held.fill = reinterpret_cast<FillFn>(dlsym(driver, "cuMemsetD8Async"));
  if (!held.launch || !held.context || !held.retain || !held.set_context || !held.fill) {
    return PyUnicode_FromString(
        "libcuda.so.1 lacks cuLaunchKernelEx, cuCtxGetCurrent, cuDevicePrimaryCtxRetain, cuCtxSetCurrent or "
        "cuMemsetD8Async");
  }
  if (Handles<c10::Stream>::known) {
    held.stream = &Handles<c10::Stream>::of;
  } else {
    // c10::cuda::CUDAStream holds a c10::Stream and nothing else; this is its stream() const.
    void* library = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library != nullptr) {
      held.stream = reinterpret_cast<StreamFn>(dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv"));
    }
    if (held.stream == nullptr) return PyUnicode_FromString("this torch does not tell the handle of a stream");
  }
  held.device_type = c10::kCUDA;
  held.allowed_keys = keys_of(c10::kCUDA);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// For tests: tensors on the CPU, and a function of the caller's in place of cuLaunchKernelEx.
PyObject* use_cpu(PyObject*, PyObject* address) {
  HANDLE_TH_ERRORS
  State& held = state();
  held.launch = reinterpret_cast<LaunchFn>(PyLong_AsUnsignedLongLong(address));
  held.context = nullptr;
  held.stream = nullptr;
  held.fill = [](uint64_t address, unsigned char byte, size_t count, void*) {
    std::memset(reinterpret_cast<void*>(address), byte, count);
    return 0;
  };
  held.device_type = c10::kCPU;
  held.allowed_keys = keys_of(c10::kCPU);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

#define RETROGRAD_METHODS                                                                                   \
  {"apply", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(apply)), METH_FASTCALL, nullptr},    \
      {"add", add, METH_VARARGS, nullptr}, {"clear", clear, METH_NOARGS, nullptr},                          \
      {"dtype_code", dtype_code, METH_O, nullptr}, {"tell", tell, METH_VARARGS, nullptr},                   \
      {"use_cuda", use_cuda, METH_NOARGS, nullptr}, {"use_cpu", use_cpu, METH_O, nullptr}, {                \
    nullptr, nullptr, 0, nullptr                                                                            \
  }

}  // namespace
