// The recorder without Python: a fallback of the dispatcher below autograd that writes operators down on a tape.
//
// It notes what must be noted when an operator runs: numbers of values, the line and the module that asked for it, the
// autograd node; and holds tensors to be measured. Python makes records of it later (engine.py). What is noted, and in
// which order values are numbered, is what observing.py and values.py do; the tests compare the two.
//
// Fits torch 2.11 to 2.13. No CUDA headers. The GIL is the lock: whoever touches the state holds it.

#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <typeindex>
#include <unordered_map>
#include <vector>

#include "measure.hpp"

namespace {

namespace py = pybind11;
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// The key is torch's for extensions that fake tensors, directly beside Python's; nothing is registered for it.
constexpr auto KEY = c10::DispatchKey::Fake;
constexpr int DEEP = 400;                     // frames looked at
constexpr size_t MOST_HELD = 512;             // tensors that wait to be measured: a chunk of rows
constexpr size_t MOST_EVENTS = 20000;         // that wait for Python; a step of more is read in parts
constexpr size_t MOST_NODES = 500000;         // remembered of graphs that are kept over steps

enum Flag { SILENT = 1, MEMORY = 2, ALIASES = 4, ASYNCHRONOUS = 8 };
enum View { NONE, ORDERED, PERMUTED, EXPANDED };
enum Phase { FORWARD, BACKWARD, OTHER };
enum Role { USER, MODULE, ENGINE, GENERATED, REST };

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

struct Operator {
  int64_t number = -1;
  int flags = 0, view = NONE;
  std::vector<int64_t> writes, overwrites;  // positions of arguments
  std::vector<at::TypeKind> kinds;          // of arguments
  std::vector<std::optional<IValue>> defaults;  // of arguments
};

// Without memory of their own for most operators: an allocation costs as much as all else that is noted of a value.
using Numbers = c10::SmallVector<int64_t, 4>;
template <class K, class V> using Table = ska::flat_hash_map<K, V>;  // without stable addresses

struct Value {
  int64_t number, storage, offset, count;
  Numbers sizes, strides;
  at::ScalarType dtype;
  at::Device device;
  bool negative, conjugate, asked = false;
  std::string name;
};
using Held = std::shared_ptr<Value>;

struct Storage {
  Storage(c10::weak_intrusive_ptr<c10::StorageImpl> ref, int64_t number) : ref(std::move(ref)), number(number) {}
  c10::weak_intrusive_ptr<c10::StorageImpl> ref;
  int64_t number;
  bool unwritten = false;
  int64_t batch = -1;  // the batch of waiting tensors in which it has one
  c10::SmallVector<Held, 2> values;
};

struct Event {
  int64_t op = -1, step = 0, line = -1, inside = -1, module = -1, node = -1;
  int phase = OTHER;
  bool generated = false;
  std::vector<std::pair<int64_t, IValue>> facts;  // arguments that are no tensors and not at their default
  Numbers inputs, outputs;
  std::vector<std::string> kernels;
};

struct Waiting {
  Tensor tensor;
  int64_t number;
  const void* data;
};

struct State {
  py::object python;  // the engine
  bool names = false, full = false, optimizing = false, done = false;
  c10::DeviceType kind = at::kCUDA;  // of devices where tensors wait to be measured together
  int64_t few_bytes = 0;             // up to which few programs measure one of them; 0 without the kernel
  int64_t most_bytes = 0;            // of tensors that wait to be measured
  int64_t step = 0, numbers = 0, storage_numbers = 0, thread = 0;
  std::unordered_map<const void*, Operator> operators;  // by the address of the schema
  Table<c10::StorageImpl*, std::unique_ptr<Storage>> storages;
  std::vector<std::pair<std::string, Tensor>> named;
  Table<c10::StorageImpl*, std::pair<std::string, int64_t>> parameters;  // name and elements of `named`
  Table<PyObject*, int> roles;
  Table<PyObject*, int64_t> modules;
  Table<uint64_t, std::pair<int64_t, int64_t>> forward;
  std::unordered_map<std::string, int64_t> words;  // names of nodes and modules
  std::unordered_map<std::type_index, int64_t> nodes;
  std::unordered_map<PyObject*, Table<int, int64_t>> lines;  // by code and instruction
  int64_t line_count = 0;
  int64_t task = -1, task_line = -1;  // the backward whose line was looked for last
  // what Python has not taken yet
  std::vector<Event> events;
  std::vector<Held> made;
  std::vector<Waiting> waiting;
  std::vector<std::pair<int64_t, measure::Row>> rows;  // of values by number
  py::list links, new_lines, new_words, renamed;
  int64_t bytes = 0, batch = 0;
  c10::Stream stream{c10::Stream::UNSAFE, at::Device(at::kCPU), 0};
};

State* state = nullptr;
thread_local int quiet = 0;
thread_local Event* current = nullptr;

int64_t word(State& s, const std::string& text) {
  auto [at, fresh] = s.words.try_emplace(text, s.words.size());
  if (fresh) s.new_words.append(py::bytes(text));
  return at->second;
}

// ---- values ----

Held fresh(State& s, int64_t storage, const Tensor& t) {
  auto v = std::make_shared<Value>(Value{s.numbers++, storage, 0, 0, {}, {}, t.scalar_type(), t.device(), false, false});
  if (!t.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    v->sizes = t.sizes();
    v->count = t.numel();
  }
  s.made.push_back(v);
  return v;
}

Storage* entry(State& s, const Tensor& t) {
  if (t.layout() != at::kStrided || !t.has_storage()) return nullptr;
  auto* address = t.storage().unsafeGetStorageImpl();
  auto& place = s.storages[address];
  if (!place) place = std::make_unique<Storage>(t.storage().getWeakStorageImpl(), s.storage_numbers++);
  return place.get();
}

Held of(State& s, const Tensor& t) {
  auto* place = entry(s, t);
  if (!place || t.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return fresh(s, -1, t);
  const auto sizes = t.sizes(), strides = t.strides();
  const auto offset = t.storage_offset();
  for (const auto& v : place->values)
    if (v->offset == offset && v->dtype == t.scalar_type() && sizes == v->sizes && strides == v->strides &&
        v->negative == t.is_neg() && v->conjugate == t.is_conj())
      return v;
  auto v = fresh(s, place->number, t);
  v->offset = offset;
  v->strides = strides;
  v->negative = t.is_neg();
  v->conjugate = t.is_conj();
  auto named = s.parameters.find(t.storage().unsafeGetStorageImpl());
  if (named != s.parameters.end() && named->second.second == v->count) v->name = named->second.first;
  place->values.push_back(v);
  return v;
}

void written(State& s, const Tensor& t) {
  if (auto* place = entry(s, t)) {
    place->values.clear();
    place->unwritten = false;
  }
}

// ---- what is measured ----

// Whether the stream's device is the current one.
bool here(const c10::Stream& stream) {
  const auto kind = stream.device_type();
  return kind == at::kCPU || c10::impl::VirtualGuardImpl(kind).getDevice() == stream.device();
}

// Tensors that one launch of the kernel measures: a row each of address, elements, place and number of the value.
struct Group {
  at::ScalarType dtype;
  bool whole, few;
  std::vector<std::array<int64_t, 3>> rows;
};

bool group(const State& s, Waiting& w, bool current, std::vector<Group>& groups) {
  auto& t = w.tensor;
  if (!s.few_bytes || t.device().type() != s.kind || t.layout() != at::kStrided || t.is_neg() || !t.numel() ||
      !measure::takes(t.scalar_type()))
    return false;
  if (!t.is_contiguous()) {
    if (!current) return false;
    t = t.contiguous();  // positions count as they are read; lives until the launch
  }
  const auto address = reinterpret_cast<int64_t>(t.const_data_ptr());
  const int64_t bytes = t.numel() * t.element_size();
  const bool whole = !((address | bytes) % 16), few = bytes <= s.few_bytes;
  auto at = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
    return g.dtype == t.scalar_type() && g.whole == whole && g.few == few;
  });
  if (at == groups.end()) at = groups.insert(at, {t.scalar_type(), whole, few, {}});
  at->rows.push_back({address, t.numel(), w.number});
  return true;
}

py::tuple table_of(const std::vector<Group>& groups) {
  int64_t count = 0;
  for (const auto& g : groups) count += g.rows.size();
  auto table = at::empty({count, 4}, at::kLong);
  auto* to = table.mutable_data_ptr<int64_t>();
  py::list told;
  int64_t place = 0;
  for (const auto& g : groups) {
    for (const auto& [address, elements, number] : g.rows) {
      const int64_t row[] = {address, elements, place++, number};
      to = std::copy(row, row + 4, to);
    }
    auto dtype = py::reinterpret_borrow<py::object>((PyObject*)torch::getTHPDtype(g.dtype));
    told.append(py::make_tuple(dtype, g.whole, g.few, g.rows.size()));
  }
  return py::make_tuple(table, told);
}

void flush(State& s) {
  if (s.waiting.empty()) return;
  auto waiting = std::move(s.waiting);
  s.waiting.clear();
  s.bytes = 0;
  s.batch++;
  py::list others;
  std::vector<Group> groups;
  const auto kind = s.stream.device_type();
  const bool current = kind == at::kCPU ||
      (here(s.stream) && c10::impl::VirtualGuardImpl(kind).getStream(s.stream.device()) == s.stream);
  // Modes of the user's see nothing of it.
  c10::impl::ExcludeDispatchKeyGuard modes(c10::python_ks);
  quiet++;
  try {
    for (auto& w : waiting) {
      // Memory that was freed or moved meanwhile, as FSDP does with parameters, cannot be read any more.
      const bool there = w.tensor.layout() != at::kStrided ||
          (w.tensor.storage().data() == w.data &&
           w.tensor.storage().nbytes() >= static_cast<size_t>(w.tensor.numel() ? w.tensor.element_size() : 0));
      if (!there || !group(s, w, current, groups))
        others.append(py::make_tuple(w.number, there ? py::cast(w.tensor) : py::object(py::none())));
    }
    const auto stream = s.stream.pack3();
    py::object on = py::none();
    if (!current) on = py::make_tuple(stream.stream_id, stream.device_index, (int)stream.device_type);
    if (!others.empty()) s.python.attr("measure")(others, on);
    if (!groups.empty()) {
      auto told = table_of(groups);
      s.python.attr("measure_table")(told[0], told[1], s.stream.device().str(), on);
    }
  } catch (...) {
    quiet--;
    throw;
  }
  quiet--;
}

bool has_numbers(const Tensor& t) {
  return !t.key_set().has(c10::DispatchKey::Python) && (t.layout() == at::kStrided || t.layout() == at::kSparse) &&
      !t.is_quantized() && !t.is_meta();
}

// Whether the tensor was measured here: of a dense one on the CPU that is to be read now.
bool measured(State& s, int64_t number, const Tensor& t) {
  if (!t.is_cpu() || s.kind == at::kCPU || t.layout() != at::kStrided || t.is_neg() || !measure::takes(t.scalar_type()))
    return false;
  const auto count = t.numel();
  if (count && t.storage().nbytes() < (size_t)t.element_size()) return false;
  static const auto of = measure::widest(64);
  if (t.is_contiguous()) {
    s.rows.emplace_back(number, of(t.scalar_type(), t.const_data_ptr(), count, s.full));
    return true;
  }
  c10::impl::ExcludeDispatchKeyGuard modes(c10::python_ks);
  at::AutoDispatchBelowAutograd below;
  quiet++;
  const auto dense = t.contiguous();
  quiet--;
  s.rows.emplace_back(number, of(t.scalar_type(), dense.const_data_ptr(), count, s.full));
  return true;
}

void ask(State& s, Value& v, const Tensor& tensor) {
  if (v.asked) return;
  v.asked = true;
  if (!has_numbers(tensor)) return;
  auto t = tensor.layout() == at::kSparse ? tensor._values() : tensor;
  if (measured(s, v.number, t)) return;
  c10::Stream stream = s.stream;
  if (t.device().type() != at::kCPU) {
    stream = c10::impl::VirtualGuardImpl(t.device().type()).getStream(t.device());
    if (!(stream == s.stream)) flush(s);
  }
  // Without its autograd graph, which would live longer; a mode of the user's would be told of a detach.
  c10::impl::ExcludeDispatchKeyGuard modes(c10::python_ks);
  auto bare = Tensor(t.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
  s.stream = stream;
  s.waiting.push_back({bare, v.number, t.layout() == at::kStrided ? t.storage().data() : nullptr});
  if (auto* place = entry(s, t)) place->batch = s.batch;
  s.bytes += t.numel() * t.element_size();
  // Another stream than the usual one may be captured by a graph, which is asked before more comes.
  if (t.device().type() != s.kind || s.waiting.size() >= MOST_HELD || s.bytes > s.most_bytes || stream.id() != 0)
    flush(s);
}

// ---- who asked for it ----

int role_of(State& s, PyObject* code) {
  auto at = s.roles.find(code);
  if (at != s.roles.end()) return at->second;
  int role = s.python.attr("role")(py::handle(code)).cast<int>();
  Py_INCREF(code);  // its address must not come to mean another one
  return s.roles[code] = role;
}

int64_t line_of(State& s, PyFrameObject* frame, PyObject* code) {
  const int at = PyFrame_GetLasti(frame);
  auto& lines = s.lines[code];
  auto known = lines.find(at);
  if (known != lines.end()) return known->second;
  s.new_lines.append(py::make_tuple(py::handle(code), PyFrame_GetLineNumber(frame)));
  return lines[at] = s.line_count++;
}

py::object self_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030C0000
  return py::reinterpret_steal<py::object>(PyFrame_GetVarString(frame, "self"));
#else
  auto locals = py::reinterpret_steal<py::object>(PyFrame_GetLocals(frame));
  return py::reinterpret_borrow<py::object>(PyDict_GetItemString(locals.ptr(), "self"));
#endif
}

struct Where {
  int64_t line = -1, module = -1;  // of the words; -1 for none
  bool generated = false;
};

Where look(State& s) {
  Where found;
  py::object inner, outer;
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  for (int k = 0; k < DEEP && frame; k++) {
    auto* f = reinterpret_cast<PyFrameObject*>(frame.ptr());
    auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(f)));
    const int role = role_of(s, code.ptr());
    if (role == USER) {
      if (found.line < 0) found.line = line_of(s, f, code.ptr());
    } else if (role == MODULE) {
      outer = self_of(f);
      if (!outer) throw py::error_already_set();
      if (!inner) inner = outer;
    } else if (role == GENERATED) {
      found.generated = true;
    } else if (role == ENGINE) {
      break;
    }
    if (found.line >= 0 && inner && s.modules.count(inner.ptr())) break;
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(f)));
  }
  if (!inner) return found;
  auto known = s.modules.find(inner.ptr());
  // Python tells names of new models by `modules`, and that of this one, which may be in none of them.
  found.module = known != s.modules.end() ? known->second
                                          : word(s, s.python.attr("module")(inner, outer).cast<std::string>());
  return found;
}

int64_t node_word(State& s, torch::autograd::Node& node) {
  const auto& type = typeid(node);
  const bool python = std::strstr(type.name(), "PyNode") != nullptr;
  if (!python)
    if (auto at = s.nodes.find(type); at != s.nodes.end()) return at->second;
  auto name = node.name();
  if (name.rfind("torch::autograd::", 0) == 0) name = name.substr(17);
  if (name.rfind("CompiledFunction", 0) == 0) s.python.attr("compiled_node")();
  const auto number = word(s, name);
  if (!python) s.nodes[type] = number;
  return number;
}

// The node of this operator, which autograd has just made, if it made one: the first to come has it.
void note_node(State& s, const Event& e) {
  if (const auto made = at::sequence_number::peek()) s.forward.emplace(made - 1, std::make_pair(e.line, e.module));
}

// The line that waits for the backward that runs: looked for once.
int64_t waiting_line(State& s) {
  const auto task = torch::autograd::get_current_graph_task_id();
  if (task == s.task) return s.task_line;
  const auto line = s.python.attr("waiting_line")();
  s.task = task;
  s.task_line = -1;
  if (!line.is_none()) {
    s.new_lines.append(line);
    s.task_line = s.line_count++;
  }
  return s.task_line;
}

void locate(State& s, Event& e) {
  const auto where = look(s);
  e.generated = where.generated;
  if (where.generated) s.python.attr("compiled_frame")();
  if (torch::autograd::get_current_graph_task_id() == -1) {
    e.line = where.line;
    e.module = where.module;
    if (where.module >= 0 && !s.optimizing) e.phase = FORWARD;
    note_node(s, e);
    return;
  }
  e.phase = BACKWARD;
  bool of_forward = false;  // whether a node runs that an operator of the forward made
  if (auto node = torch::autograd::get_current_node()) {
    e.node = node_word(s, *node);
    of_forward = true;
    if (auto at = s.forward.find(node->sequence_nr()); at != s.forward.end())
      std::tie(e.line, e.module) = at->second;
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node.get())) {
      of_forward = false;
      const auto& name = of(s, leaf->variable)->name;
      const auto end = name.rfind('.');
      e.module = word(s, end == std::string::npos ? "" : name.substr(0, end));
    }
  }
  if (where.module >= 0) {  // a forward computed again, by checkpointing
    e.line = where.line;
    e.module = where.module;
  } else {
    e.inside = where.line;
  }
  if (e.line < 0 && !of_forward) e.line = waiting_line(s);
  if ((int64_t)PyThread_get_thread_ident() == s.thread)
    note_node(s, e);
}

// ---- an operator ----

Operator& known(State& s, const c10::OperatorHandle& handle) {
  const void* schema = &handle.schema();
  if (auto at = s.operators.find(schema); at != s.operators.end()) return at->second;
  const auto& name = handle.operator_name();
  py::tuple facts = s.python.attr("operator")(name.name, name.overload_name);
  Operator op;
  op.number = facts[0].cast<int64_t>();
  op.flags = facts[1].cast<int>();
  op.view = facts[2].cast<int>();
  op.writes = facts[3].cast<std::vector<int64_t>>();
  op.overwrites = facts[4].cast<std::vector<int64_t>>();
  for (const auto& argument : handle.schema().arguments()) {
    auto type = argument.real_type();
    while (auto inner = type->cast<c10::OptionalType>()) type = inner->getElementType();
    op.kinds.push_back(type->kind());
    op.defaults.push_back(argument.default_value());
  }
  return s.operators.emplace(schema, std::move(op)).first->second;
}

// A number of Python that an operator takes as a tensor, as the 2 of x * 2.
bool is_number(const IValue& given) {
  return given.isTensor() && given.toTensor().defined() &&
      given.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

IValue number_of(const Tensor& t) {
  if (!t.is_cpu()) return IValue("number");
  switch (t.scalar_type()) {
    case at::kLong: return IValue(*t.const_data_ptr<int64_t>());
    case at::kDouble: return IValue(*t.const_data_ptr<double>());
    case at::kBool: return IValue(*t.const_data_ptr<bool>());
    case at::kComplexDouble: return IValue(*t.const_data_ptr<c10::complex<double>>());
    default: return IValue("number");
  }
}

template <class Each>
bool tensors_in(const IValue& given, const Each& each) {
  if (given.isTensor()) {
    if (!given.toTensor().defined() || is_number(given)) return false;
    each(given.toTensor());
    return true;
  }
  bool any = false;
  if (given.isTensorList()) {
    for (const IValue& one : given.toListRef()) {
      if (!one.toTensor().defined()) continue;
      each(one.toTensor());
      any = true;
    }
  } else if (given.isList()) {
    for (const auto& one : given.toListRef()) any |= tensors_in(one, each);
  } else if (given.isTuple()) {
    for (const auto& one : given.toTupleRef().elements()) any |= tensors_in(one, each);
  }
  return any;
}

// Whether an argument is left at a default that takes no time to compare; Python looks at the others.
bool at_default(const IValue& v, const std::optional<IValue>& usual) {
  if (!usual) return false;
  if (v.isNone()) return usual->isNone();
  if (v.isBool()) return usual->isBool() && v.toBool() == usual->toBool();
  if (v.isInt()) return usual->isInt() && v.toInt() == usual->toInt();
  return v.isDouble() && usual->isDouble() && v.toDouble() == usual->toDouble();
}

struct Call {
  Operator& op;
  Event event;
  Held source;  // the first input
  std::vector<Tensor> writes, all;  // `all` only of operators of compiled code, which are not noted
};

void before(State& s, Call& call, const IValue* args, size_t count) {
  auto& op = call.op;
  auto& e = call.event;
  locate(s, e);
  if (e.generated) {
    for (size_t at = 0; at < count; at++) tensors_in(args[at], [&](const Tensor& t) { call.all.push_back(t); });
    return;
  }
  const bool measuring = !(op.view || (op.flags & ALIASES) || s.names) && !(s.optimizing && !s.full);
  std::vector<const at::TensorImpl*> overwritten;
  for (auto at : op.overwrites)
    tensors_in(args[at], [&](const Tensor& t) { overwritten.push_back(t.unsafeGetTensorImpl()); });
  bool grad = false;
  for (size_t at = 0; at < count; at++) {
    const bool any = tensors_in(args[at], [&](const Tensor& t) {
      grad |= t.requires_grad();
      for (auto* other : overwritten)
        if (other == t.unsafeGetTensorImpl()) return;
      auto v = of(s, t);
      if (!v->asked) {
        auto* made_by = t.requires_grad() ? torch::autograd::impl::grad_fn_unsafe(t) : nullptr;
        if (made_by && std::strstr(typeid(*made_by).name(), "PyNode")) node_word(s, *made_by);
        if (measuring) ask(s, *v, t);
      }
      e.inputs.push_back(v->number);
      if (!call.source) call.source = std::move(v);
    });
    if (!any && !at_default(args[at], op.defaults[at])) e.facts.emplace_back(at, is_number(args[at]) ? number_of(args[at].toTensor()) : args[at]);
  }
  for (auto at : op.writes)
    tensors_in(args[at], [&](const Tensor& t) {
      call.writes.push_back(t);
      if (auto* place = entry(s, t); place && place->batch == s.batch) flush(s);
    });
  if (e.phase == OTHER && !s.optimizing && at::GradMode::is_enabled()) e.phase = grad ? FORWARD : OTHER;
}

void link(State& s, Value& v, const Call& call, const Tensor& t) {
  // A view with the elements of its source has the statistics of its source.
  if (!call.source) return;
  const auto& source = *call.source;
  if (v.asked || &v == &source || !source.asked || source.dtype != v.dtype) return;
  const auto view = call.op.view;
  const int64_t elements = t.numel(), from = source.count;
  if (from == 0 || elements % from || (view != EXPANDED && elements != from)) return;
  const bool ordered = view == ORDERED || (elements == 1 && from == 1) || (view == EXPANDED && elements == from);
  if (s.full && !ordered) return;
  v.asked = true;
  s.links.append(py::make_tuple(v.number, source.number, elements / from, ordered));
}

void after(State& s, Call& call, const IValue* outs, size_t count) {
  auto& op = call.op;
  if (call.event.generated) {
    // Kernels that are not seen run between the operators of compiled code: what was measured may not last.
    for (const auto& t : call.all) written(s, t);
    for (size_t at = 0; at < count; at++) tensors_in(outs[at], [&](const Tensor& t) { written(s, t); });
    return;
  }
  for (const auto& t : call.writes) written(s, t);
  std::vector<Tensor> made;
  for (size_t at = 0; at < count; at++) tensors_in(outs[at], [&](const Tensor& t) { made.push_back(t); });
  const size_t returned = made.size();
  for (const auto& t : call.writes) {
    bool there = false;
    for (size_t at = 0; at < returned; at++) there |= made[at].is_same(t);
    if (!there) made.push_back(t);
  }
  for (const auto& t : made) {
    if (op.flags & MEMORY)
      if (auto* place = entry(s, t)) {
        place->values.clear();
        place->unwritten = true;
      }
    auto v = of(s, t);
    call.event.outputs.push_back(v->number);
    if (op.view && call.writes.empty()) {
      link(s, *v, call, t);
    } else if (!(op.flags & (MEMORY | ALIASES | ASYNCHRONOUS)) && !s.names) {
      // Of what an optimizer keeps only parameters count at level fast.
      if (s.full || !s.optimizing || (t.is_leaf() && t.requires_grad())) ask(s, *v, t);
    }
  }
}

template <class What>
void guarded(State& s, const What& what) {
  try {
    what();
  } catch (py::error_already_set& error) {
    if (s.python.attr("lost")(error.value()).cast<bool>()) throw;
  } catch (const std::exception& error) {
    PyErr_Clear();
    s.python.attr("lost")(py::str(error.what()));
  }
}

void failed(State& s, Call& call, const char* kind, const std::string& said) {
  py::error_scope kept;  // an error of Python's own is on its way
  s.events.push_back(std::move(call.event));
  s.python.attr("failed")(kind, said);
}

const char* kind_of(const c10::Error& error) {
  if (dynamic_cast<const c10::IndexError*>(&error)) return "IndexError";
  if (dynamic_cast<const c10::ValueError*>(&error)) return "ValueError";
  if (dynamic_cast<const c10::TypeError*>(&error)) return "TypeError";
  if (dynamic_cast<const c10::NotImplementedError*>(&error)) return "NotImplementedError";
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) ? "OutOfMemoryError" : "RuntimeError";
}

bool made_of_others(State& s, const Stack& stack, size_t count) {
  bool found = false;
  for (size_t at = stack.size() - count; at < stack.size() && !found; at++)
    tensors_in(stack[at], [&](const Tensor& t) {
      if (found || !t.key_set().has(c10::DispatchKey::Python)) return;
      Gil gil;
      auto wrapped = py::cast(t);
      found = s.python.attr("made_of_others")(py::type::of(wrapped)).cast<bool>();
    });
  return found;
}

void record(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, KEY);
  const size_t count = handle.schema().arguments().size(), returns = handle.schema().returns().size();
  // Tensors that are made of others (DTensor) go first, so that what they do inside is seen.
  if (!state || state->done || quiet || made_of_others(*state, *stack, count)) return handle.redispatchBoxed(below, stack);
  State& s = *state;
  c10::impl::ExcludeDispatchKeyGuard guard(KEY);
  std::optional<Call> call;
  {
    Gil gil;
    auto& op = known(s, handle);
    if (!(op.flags & SILENT)) {
      call.emplace(Call{op});
      call->event.op = op.number;
      call->event.step = s.step;
      guarded(s, [&] { before(s, *call, stack->data() + stack->size() - count, count); });
    }
  }
  if (!call) return handle.redispatchBoxed(below, stack);
  auto* outer = current;
  current = &call->event;
  try {
    handle.redispatchBoxed(below, stack);
  } catch (const c10::Error& error) {
    current = outer;
    Gil gil;
    failed(s, *call, kind_of(error), error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    current = outer;
    Gil gil;
    failed(s, *call, "RuntimeError", error.what());
    throw;
  }
  current = outer;
  Gil gil;
  guarded(s, [&] { after(s, *call, stack->data() + stack->size() - returns, returns); });
  if (!call->event.generated) s.events.push_back(std::move(call->event));
  call.reset();  // while the GIL is held
  if (s.events.size() >= MOST_EVENTS) guarded(s, [&] { s.python.attr("many")(); });
}

// ---- kernels beside operators ----

py::object launching(int64_t op, const std::vector<Tensor>& tensors, Event& e) {
  State& s = *state;
  flush(s);  // what the kernel may write to is measured before
  e.op = op;
  e.step = s.step;
  locate(s, e);
  bool grad = false;
  for (const auto& t : tensors) grad |= t.requires_grad();
  if (e.phase == OTHER && grad && at::GradMode::is_enabled()) e.phase = FORWARD;
  for (const auto& t : tensors) {
    auto v = of(s, t);
    if (!s.names) ask(s, *v, t);
    e.inputs.push_back(v->number);
  }
  flush(s);
  return py::none();
}

py::list launched(const std::vector<Tensor>& tensors, Event& e) {
  State& s = *state;
  py::list fresh_ones;
  for (size_t at = 0; at < tensors.size(); at++) {
    const auto& t = tensors[at];
    auto* place = entry(s, t);
    const bool unwritten = place && place->unwritten;
    written(s, t);
    auto v = of(s, t);
    if (unwritten) fresh_ones.append(v->number);
    if (e.inputs.at(at) != v->number && !s.names) ask(s, *v, t);
    e.outputs.push_back(v->number);
  }
  return fresh_ones;
}

// ---- what Python takes ----

py::object fact(const IValue& v, at::TypeKind kind) {
  if (v.isInt()) {
    const auto code = v.toInt();
    if (kind == at::TypeKind::ScalarTypeType)
      return py::reinterpret_borrow<py::object>((PyObject*)torch::getTHPDtype((at::ScalarType)code));
    if (kind == at::TypeKind::LayoutType)
      return py::reinterpret_borrow<py::object>((PyObject*)torch::getTHPLayout((at::Layout)code));
    if (kind == at::TypeKind::MemoryFormatType)
      return py::reinterpret_borrow<py::object>(torch::utils::getTHPMemoryFormat((at::MemoryFormat)code));
    return py::int_(code);
  }
  if (v.isBool()) return py::bool_(v.toBool());
  if (v.isDouble()) return py::float_(v.toDouble());
  if (v.isString()) return py::str(v.toStringRef());
  if (v.isComplexDouble()) return py::cast(std::complex<double>(v.toComplexDouble().real(), v.toComplexDouble().imag()));
  if (v.isDevice()) return py::reinterpret_steal<py::object>(THPDevice_New(v.toDevice()));
  if (v.isList()) {
    py::tuple all(v.toListRef().size());
    size_t at = 0;
    for (const auto& one : v.toListRef()) all[at++] = fact(one, kind);
    return all;
  }
  if (v.isNone() || v.isTensor()) return py::none();
  return py::str(v.isGenerator() ? "generator" : v.tagKind());
}

py::tuple numbers(c10::ArrayRef<int64_t> from) {
  py::tuple all(from.size());
  for (size_t at = 0; at < from.size(); at++) all[at] = py::int_(from[at]);
  return all;
}

py::tuple event(Event& e, const std::unordered_map<int64_t, const Operator*>& by) {
  auto op = by.find(e.op);
  py::tuple facts(e.facts.size());
  for (size_t at = 0; at < e.facts.size(); at++) {
    const auto position = e.facts[at].first;
    facts[at] = py::make_tuple(
        position, fact(e.facts[at].second, op == by.end() ? at::TypeKind::NoneType : op->second->kinds.at(position)));
  }
  return py::make_tuple(
      e.op, e.step, e.phase, e.line, e.inside, e.module, e.node, facts, numbers(e.inputs), numbers(e.outputs),
      py::cast(e.kernels));
}

py::tuple row(const measure::Row& r, const py::object& exponents) {
  const py::object none = py::none();
  const bool any = r.floating ? r.finite() : r.count;
  const auto range = [&](double number) { return any ? py::object(py::float_(number)) : none; };
  const auto count = [&](int64_t number) { return r.floating ? py::object(py::int_(number)) : none; };
  return py::make_tuple(
      range(r.low), range(r.high), range(r.rms), count(r.nan), count(r.inf), count(r.subnormal), r.zero, r.digest,
      r.has_exponents ? exponents(r.least, numbers(r.positive), numbers(r.negative)) : none);
}

py::tuple drain() {
  State& s = *state;
  flush(s);
  std::unordered_map<int64_t, const Operator*> by;
  for (const auto& [address, op] : s.operators) by[op.number] = &op;
  // Taken away first: what is made here may run Python's finalizers, and another thread an operator.
  auto values = std::move(s.made);
  auto noted = std::move(s.events);
  auto measured = std::move(s.rows);
  s.made.clear();
  s.events.clear();
  s.rows.clear();
  py::list made, events;
  for (const auto& v : values)
    made.append(py::make_tuple(
        v->number, v->storage, v->offset, numbers(v->sizes),
        py::reinterpret_borrow<py::object>((PyObject*)torch::getTHPDtype(v->dtype)), v->device.str(), v->name));
  for (auto& e : noted) events.append(event(e, by));
  py::dict rows;
  const auto exponents = s.python.attr("exponents");
  for (const auto& [number, r] : measured) rows[py::int_(number)] = row(r, exponents);
  auto all = py::make_tuple(made, rows, events, s.links, s.new_lines, s.new_words, s.renamed);
  s.links = py::list();
  s.new_lines = py::list();
  s.new_words = py::list();
  s.renamed = py::list();
  return all;
}

// ---- begin, end, between steps ----

void begin(py::object engine, bool names, bool full, const std::string& kind, int64_t few_bytes,
           int64_t most_bytes) {
  TORCH_CHECK(!state, "another tape is at work");
  state = new State;
  state->python = std::move(engine);
  state->names = names;
  state->full = full;
  state->kind = at::Device(kind).type();
  state->few_bytes = few_bytes;
  state->most_bytes = most_bytes;
  state->thread = (int64_t)PyThread_get_thread_ident();
  c10::impl::tls_set_dispatch_key_included(KEY, true);
}

void finish() {
  c10::impl::tls_set_dispatch_key_included(KEY, false);
  State* old = state;
  state = nullptr;
  if (old)
    for (auto& [code, role] : old->roles) Py_DECREF(code);
  delete old;
}

// Names of parameters and buffers, by the storages in which they lie now: FSDP moves them.
void place_names(State& s) {
  s.parameters.clear();
  for (const auto& [name, t] : s.named) {
    if (t.layout() != at::kStrided || !t.has_storage()) continue;
    auto* storage = t.storage().unsafeGetStorageImpl();
    const auto count = t.numel();
    if (!s.parameters.emplace(storage, std::make_pair(name, count)).second) continue;
    auto at = s.storages.find(storage);
    if (at == s.storages.end()) continue;
    for (auto& v : at->second->values)
      if (v->count == count && v->name != name) {
        v->name = name;
        s.renamed.append(py::make_tuple(v->number, name));
      }
  }
}

void name(std::vector<std::pair<std::string, Tensor>> tensors, const py::dict& modules) {
  State& s = *state;
  s.named = std::move(tensors);
  place_names(s);
  s.modules.clear();
  for (auto [module, name] : modules)
    s.modules[reinterpret_cast<PyObject*>(module.cast<int64_t>())] = word(s, name.cast<std::string>());
}

void begin_step(int64_t step) {
  State& s = *state;
  s.step = step;
  for (auto at = s.storages.begin(); at != s.storages.end();) at->second->ref.expired() ? at = s.storages.erase(at) : ++at;
  if (s.forward.size() > MOST_NODES) s.forward.clear();
  place_names(s);
}

// The number of the next value, and those before it that an operator may still name.
py::tuple live() {
  State& s = *state;
  py::set numbers;
  for (const auto& [address, place] : s.storages)
    for (const auto& v : place->values) numbers.add(py::int_(v->number));
  return py::make_tuple(s.numbers, numbers);
}

}  // namespace

PYBIND11_MODULE(retrograd_trace_tape, m) {
  // For the life of the process: operators may be under way when a recorder ends.
  static auto fallback = c10::Dispatcher::singleton().registerFallback(
      KEY, c10::KernelFunction::makeFromBoxedFunction<&record>(), "retrograd.trace.tape");
  py::class_<Event>(m, "Event").def(py::init<>()).def_readwrite("kernels", &Event::kernels);
  m.def("begin", &begin);
  m.def("end", &finish);
  m.def("name", &name);
  m.def("step", &begin_step);
  m.def("live", &live);
  m.def("drain", &drain);
  m.def("flush", [] { flush(*state); });
  // Before torch 2.13 whatever runs inside a tensor's own __torch_dispatch__ is hidden from keys above Python's.
  m.attr("above_python") = KEY > c10::DispatchKey::Python;
  m.def("at_work", [] { return state != nullptr; });
  m.def("count", [] { return state->events.size(); });
  m.def("stop", [] { state->done = true; });
  m.def("optimizing", [](bool now) { state->optimizing = now; });
  m.def("quiet", [](bool now) { quiet += now ? 1 : -1; });
  m.def("in_operator", [] { return current != nullptr; });
  m.def("kernel", [](const std::string& name) { current->kernels.push_back(name); });
  m.def("launching", &launching);
  m.def("launched", &launched);
  m.def("measure", [](const Tensor& t, bool exponents, int bytes, py::object kind) {
    TORCH_CHECK(t.is_cpu() && t.is_contiguous() && measure::takes(t.scalar_type()), "not measured here");
    return row(measure::widest(bytes)(t.scalar_type(), t.const_data_ptr(), t.numel(), exponents), kind);
  });
  m.def("append", [](Event& e) { state->events.push_back(e); });
}
