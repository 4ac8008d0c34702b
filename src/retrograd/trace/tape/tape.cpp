// The recorder without Python: a fallback of the dispatcher below autograd that writes operators down on a tape.
//
// It notes what must be noted when an operator runs: numbers of values, the line and the module that asked for it, the
// autograd node; and holds tensors to be measured. Python makes records of it later (engine.py). What is noted, and in
// which order values are numbered, is what observer.py and value_ids.py do; the tests compare the two.
//
// Fits torch 2.11 to 2.15. No CUDA headers. A mutex is the lock, and what was met before is noted without the GIL; what is
// new asks Python. Nobody waits for the GIL while they hold the mutex (`with_python`).

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
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "frames.hpp"
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
constexpr size_t SWEPT = 64;                  // storages looked at together whether they are gone

enum Flag { SILENT = 1, MEMORY = 2, ALIASES = 4, ASYNCHRONOUS = 8, DIVIDES = 16, DIVIDES_TWO = 32 };
enum View { NONE, ORDERED, PERMUTED, EXPANDED };
enum Phase { FORWARD, BACKWARD, OTHER };
enum Role { USER, MODULE, ENGINE, GENERATED, REST, GRAPH, COMPILER };  // as in source_lines.py

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

template <class K, class V, class Hash = std::hash<K>> using Table = ska::flat_hash_map<K, V, Hash>;  // addresses move
template <class T, unsigned N> using Few = c10::SmallVector<T, N>;  // N without memory of their own

struct Value {
  int64_t number, count;
  uint64_t view;  // a hash of where it lies in its storage and how
  int32_t name;   // of the words
  at::ScalarType dtype;
  bool asked;
};

struct Name {
  int32_t word = -1;  // of a parameter or buffer
  int64_t count = 0;  // its elements
};

struct Storage {
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> ref;  // none in a place that is free
  c10::StorageImpl* address = nullptr;
  int64_t number = -1;
  bool unwritten = false;
  int64_t batch = -1;  // the batch of waiting tensors in which it has one
  Name name;
  Few<Value, 1> values;
};

// A range of what `Notes` has of all operators.
struct Range {
  uint32_t begin = 0, count = 0;
};

struct Event {
  int32_t op = -1, step = 0, line = -1, inside = -1, module = -1, node = -1;
  int8_t phase = OTHER;
  bool generated = false, optimizing = false;
  Range facts, inputs, outputs;
  std::unique_ptr<std::vector<std::string>> kernels;
};

struct Fresh {  // a value as it is told to Python
  int64_t number, storage, offset, name;
  Range sizes;
  at::ScalarType dtype;
  at::Device device;
};

struct Link {
  int64_t number, source, repeats;
  bool ordered;
};

using Fact = std::pair<int64_t, IValue>;  // an argument that is no tensor and not at its default, by position

// What Python has not taken yet.
struct Notes {
  std::vector<Event> events;
  std::vector<Fact> facts;
  std::vector<int64_t> numbers;  // of inputs and outputs, and sizes of new values
  std::vector<Fresh> made;
  std::vector<Link> links;
  std::vector<std::pair<int64_t, measure::Row>> rows;  // of values by number
  std::vector<std::pair<PyCodeObject*, int>> lines;    // with the code's reference
  std::vector<std::string> words;
  std::vector<std::pair<int64_t, int64_t>> renamed;  // number and word
};

template <class Numbers> Range kept(std::vector<int64_t>& all, const Numbers& numbers) {
  const Range range{static_cast<uint32_t>(all.size()), static_cast<uint32_t>(numbers.size())};
  all.insert(all.end(), numbers.begin(), numbers.end());
  return range;
}

struct Waiting {
  Tensor tensor;
  int64_t number;
  const void* data;
};

struct NodeKind {
  int64_t word = -1;  // -1: of Python, with a name of its own
  bool leaf = false;
};

struct Instruction {
  PyCodeObject* code;
  int at;
  bool operator==(const Instruction& other) const { return code == other.code && at == other.at; }
};
struct InstructionHash {
  size_t operator()(const Instruction& i) const { return reinterpret_cast<size_t>(i.code) + 31 * i.at; }
};

struct State {
  py::object python;  // the engine
  bool names = false, full = false, optimizing = false;
  c10::DeviceType kind = at::kCUDA;  // of devices where tensors wait to be measured together
  int64_t few_bytes = 0;             // up to which few programs measure one of them; 0 without the kernel
  int64_t most_bytes = 0;            // of tensors that wait to be measured
  int64_t step = 0, numbers = 0, storage_numbers = 0, line_count = 0;
  unsigned long thread = 0;
  Table<const void*, std::unique_ptr<Operator>> operators;  // by the address of the schema
  Table<c10::StorageImpl*, Storage*> storages;
  std::deque<Storage> pool;  // where they lie
  std::vector<Storage*> free;
  size_t hand = 0;  // the place in the pool that is looked at next
  Value loose;      // the last that is in no storage
  std::vector<std::pair<std::string, Tensor>> named;
  std::vector<c10::StorageImpl*> named_at;  // where they lay when their names were put there
  Table<c10::StorageImpl*, Name> parameters;  // of `named`
  Table<int64_t, int64_t> owners;             // by word: the module of a parameter
  Table<PyCodeObject*, int> roles;
  Table<PyObject*, int64_t> modules;
  Table<uint64_t, std::pair<int64_t, int64_t>> forward;
  uint64_t last_node = 0;  // the number of nodes when one was put there last
  std::unordered_map<std::string, int64_t> words;  // names of nodes, modules and parameters
  std::vector<std::string> texts;
  Table<const char*, NodeKind> nodes;  // by the address of the type's name
  Table<Instruction, int64_t, InstructionHash> lines;
  int64_t task = -1, task_line = -1;  // the backward whose line was looked for last
  Notes notes;
  std::vector<Waiting> waiting;
  int64_t bytes = 0, batch = 0;
  c10::Stream stream{c10::Stream::UNSAFE, at::Device(at::kCPU), 0};
};

// A mutex whose release is a plain store: that of pthreads waits for all that was written, 50 ns in a cold cache.
class Mutex {
 public:
  void lock() {
    while (held.test_and_set(std::memory_order_acquire)) held.wait(true, std::memory_order_relaxed);
  }
  void unlock() {
    held.clear(std::memory_order_release);
    held.notify_one();
  }

 private:
  std::atomic_flag held;
};

Mutex mutex;                          // of all below
std::unique_ptr<State> state;
std::atomic<bool> recording = false;  // whether there is a state that takes operators

struct OfThread {
  int quiet = 0;             // nothing is noted
  Event* current = nullptr;  // the operator that runs
};
thread_local OfThread of_thread;

using Lock = std::unique_lock<Mutex>;

// Whoever began the recording that ended while another thread was in Python.
struct Ended : std::exception {
  const char* what() const noexcept override { return "the recording has ended"; }
};

// What needs Python, without the mutex: pointers into tables of the state are void after it.
template <class What> auto with_python(State& s, Lock& lock, const What& what) {
  struct Relock {
    Lock& lock;
    ~Relock() { lock.lock(); }
  };
  using Result = decltype(what());
  if constexpr (std::is_void_v<Result>) {
    lock.unlock();
    {
      Relock relock{lock};
      Gil gil;
      what();
    }
    if (state.get() != &s) throw Ended();
  } else {
    lock.unlock();
    auto result = [&] {
      Relock relock{lock};
      Gil gil;
      return what();
    }();
    if (state.get() != &s) throw Ended();
    return result;
  }
}

int64_t word(State& s, const std::string& text) {
  auto [at, fresh] = s.words.try_emplace(text, s.words.size());
  if (fresh) {
    s.notes.words.push_back(text);
    s.texts.push_back(text);
  }
  return at->second;
}

// ---- values ----

Value& loose(State& s, const Tensor& t) {
  const bool known = !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  const auto sizes = known ? t.sizes() : c10::IntArrayRef();
  s.loose = {s.numbers++, known ? t.numel() : 0, 0, -1, t.scalar_type(), false};
  s.notes.made.push_back({s.loose.number, -1, 0, -1, kept(s.notes.numbers, sizes), s.loose.dtype, t.device()});
  return s.loose;
}

// Forget storages that are gone, of `most` places from the hand on. What they refer to is fetched ahead: it was last
// used long ago.
void sweep(State& s, size_t most) {
  const size_t size = s.pool.size();
  for (size_t done = 0; done < std::min(most, size); done += SWEPT) {
    const size_t count = std::min({SWEPT, most - done, size - done});
    for (size_t k = 0; k < count; k++) __builtin_prefetch(s.pool[(s.hand + k) % size].address);
    for (size_t k = 0; k < count; k++) {
      auto& place = s.pool[(s.hand + k) % size];
      if (!place.ref || !place.ref->expired()) continue;
      s.storages.erase(place.address);
      place.values.clear();
      place.ref.reset();
      s.free.push_back(&place);
    }
    s.hand = (s.hand + count) % size;
  }
}

uint64_t view_of(const Tensor& t) {
  uint64_t hash = measure::mix(t.storage_offset() * 64 + static_cast<int>(t.scalar_type()));
  for (auto size : t.sizes()) hash = measure::mix(hash + size);
  for (auto stride : t.strides()) hash = measure::mix(hash ^ stride);
  return hash * 4 + t.is_neg() * 2 + t.is_conj();
}

Storage* entry(State& s, const Tensor& t) {
  if (t.layout() != at::kStrided || !t.has_storage()) return nullptr;
  auto* address = t.storage().unsafeGetStorageImpl();
  if (auto at = s.storages.find(address); at != s.storages.end()) return at->second;
  if (s.free.empty()) {
    sweep(s, SWEPT);
    // Half of the places are free after each round: a storage is looked at twice before it goes.
    while (s.free.size() < SWEPT / 2) s.free.push_back(&s.pool.emplace_back());
  }
  auto* place = s.free.back();
  s.free.pop_back();
  place->ref.emplace(t.storage().getWeakStorageImpl());
  place->address = address;
  place->number = s.storage_numbers++;
  place->unwritten = false;
  place->batch = -1;
  auto named = s.parameters.find(address);
  place->name = named == s.parameters.end() ? Name() : named->second;
  s.storages.emplace(address, place);
  return place;
}

Value& of(State& s, const Tensor& t, Storage* place) {
  if (!place || t.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return loose(s, t);
  const auto view = view_of(t);
  for (auto& v : place->values)
    if (v.view == view) return v;
  const auto count = t.numel();
  const auto name = place->name.count == count ? place->name.word : -1;
  auto& v = place->values.emplace_back(Value{s.numbers++, count, view, name, t.scalar_type(), false});
  s.notes.made.push_back(
      {v.number, place->number, t.storage_offset(), name, kept(s.notes.numbers, t.sizes()), v.dtype, t.device()});
  return v;
}

Value& of(State& s, const Tensor& t) { return of(s, t, entry(s, t)); }

Storage* written(State& s, const Tensor& t, bool unwritten = false) {
  auto* place = entry(s, t);
  if (place) {
    place->values.clear();
    place->unwritten = unwritten;
  }
  return place;
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

struct Quiet {
  Quiet() { of_thread.quiet++; }
  ~Quiet() { of_thread.quiet--; }
};

void launch_measurements(State& s, std::vector<Waiting>& waiting, const c10::Stream& stream) {
  py::list others;
  std::vector<Group> groups;
  const auto kind = stream.device_type();
  const bool current = kind == at::kCPU ||
      (here(stream) && c10::impl::VirtualGuardImpl(kind).getStream(stream.device()) == stream);
  // Modes of the user's see nothing of it.
  c10::impl::ExcludeDispatchKeyGuard modes(c10::python_ks);
  Quiet unrecorded;
  for (auto& w : waiting) {
    // Memory that was freed or moved meanwhile, as FSDP does with parameters, cannot be read any more.
    const bool there = w.tensor.layout() != at::kStrided ||
        (w.tensor.storage().data() == w.data &&
         w.tensor.storage().nbytes() >= static_cast<size_t>(w.tensor.numel() ? w.tensor.element_size() : 0));
    if (!there || !group(s, w, current, groups))
      others.append(py::make_tuple(w.number, there ? py::cast(w.tensor) : py::object(py::none())));
  }
  const auto packed = stream.pack3();
  py::object on = py::none();
  if (!current) on = py::make_tuple(packed.stream_id, packed.device_index, (int)packed.device_type);
  if (!others.empty()) s.python.attr("measure")(others, on);
  if (!groups.empty()) {
    auto told = table_of(groups);
    s.python.attr("measure_table")(told[0], told[1], stream.device().str(), on);
  }
}

void flush(State& s, Lock& lock) {
  if (s.waiting.empty()) return;
  std::vector<Waiting> waiting;
  waiting.swap(s.waiting);
  s.bytes = 0;
  s.batch++;
  with_python(s, lock, [&, stream = s.stream] {
    launch_measurements(s, waiting, stream);
    waiting.clear();
  });
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
    s.notes.rows.emplace_back(number, of(t.scalar_type(), t.const_data_ptr(), count, s.full));
    return true;
  }
  c10::impl::ExcludeDispatchKeyGuard modes(c10::python_ks);
  at::AutoDispatchBelowAutograd below;
  Quiet unrecorded;
  const auto dense = t.contiguous();
  s.notes.rows.emplace_back(number, of(t.scalar_type(), dense.const_data_ptr(), count, s.full));
  return true;
}

void ask(State& s, Lock& lock, Value& v, const Tensor& tensor) {
  if (v.asked) return;
  v.asked = true;
  if (!has_numbers(tensor)) return;
  const auto number = v.number;
  auto t = tensor.layout() == at::kSparse ? tensor._values() : tensor;
  if (measured(s, number, t)) return;
  c10::Stream stream = s.stream;
  if (t.device().type() != at::kCPU) {
    stream = c10::impl::VirtualGuardImpl(t.device().type()).getStream(t.device());
    if (!(stream == s.stream)) flush(s, lock);
  }
  // Without its autograd graph, which would live longer; a mode of the user's would be told of a detach.
  c10::impl::ExcludeDispatchKeyGuard modes(c10::python_ks);
  auto bare = Tensor(t.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
  s.stream = stream;
  s.waiting.push_back({bare, number, t.layout() == at::kStrided ? t.storage().data() : nullptr});
  if (auto* place = entry(s, t)) place->batch = s.batch;
  s.bytes += t.numel() * t.element_size();
  // Another stream than the usual one may be captured by a graph, which is asked before more comes.
  if (t.device().type() != s.kind || s.waiting.size() >= MOST_HELD || s.bytes > s.most_bytes || stream.id() != 0)
    flush(s, lock);
}

// ---- who asked for it ----

int role_of(State& s, Lock& lock, PyCodeObject* code) {
  if (auto at = s.roles.find(code); at != s.roles.end()) return at->second;
  const int role = with_python(s, lock, [&] {
    const int role = s.python.attr("role")(py::handle(reinterpret_cast<PyObject*>(code))).cast<int>();
    Py_INCREF(code);  // its address must not come to mean another one
    return role;
  });
  return s.roles[code] = role;
}

int64_t line_of(State& s, Lock& lock, PyCodeObject* code, int at) {
  const Instruction key{code, at};
  if (auto known = s.lines.find(key); known != s.lines.end()) return known->second;
  const int line = with_python(s, lock, [&] {
    Py_INCREF(code);
    return PyCode_Addr2Line(code, at);
  });
  s.notes.lines.emplace_back(code, line);
  return s.lines[key] = s.line_count++;
}

struct Where {
  int64_t line = -1, module = -1;  // of the words; -1 for none
  bool generated = false;
};

Where look(State& s, Lock& lock) {
  Where found;
  PyObject *inner = nullptr, *outer = nullptr;  // borrowed of frames
  int seen = 0;
  bool in_graph = false;
  frames::walk([&](const frames::Frame& frame) {
    auto* code = frame.code();
    const int role = role_of(s, lock, code);
    if (role == USER) {
      if (found.line < 0) found.line = line_of(s, lock, code, frame.instruction());
    } else if (role == MODULE) {
      outer = frame.self();
      if (!inner) inner = outer;
    } else if (role == GENERATED) {
      found.generated = true;
    } else if (role == GRAPH) {
      in_graph = true;
    } else if (role == COMPILER) {
      found.generated |= in_graph;  // a graph of torch.export runs as any module does
    } else if (role == ENGINE) {
      return false;
    }
    return ++seen < DEEP && !(found.line >= 0 && inner && s.modules.count(inner));
  });
  if (!inner) return found;
  if (auto known = s.modules.find(inner); known != s.modules.end()) {
    found.module = known->second;
    return found;
  }
  // Python tells names of new models by `modules`, and that of this one, which may be in none of them.
  const auto name = with_python(s, lock, [&] {
    return s.python.attr("module")(py::handle(inner), py::handle(outer)).cast<std::string>();
  });
  found.module = word(s, name);
  return found;
}

int64_t node_word(State& s, Lock& lock, const torch::autograd::Node& node) {
  const auto* type = typeid(node).name();
  auto at = s.nodes.find(type);
  if (at == s.nodes.end()) {
    NodeKind kind;
    kind.leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(&node) != nullptr;
    if (!std::strstr(type, "PyNode")) {
      auto name = node.name();
      if (name.rfind("torch::autograd::", 0) == 0) name = name.substr(17);
      kind.word = word(s, name);
    }
    at = s.nodes.emplace(type, kind).first;
  }
  if (at->second.word >= 0) return at->second.word;
  const auto name = with_python(s, lock, [&] {
    auto name = node.name();
    if (name.rfind("CompiledFunction", 0) == 0) s.python.attr("compiled_node")();
    return name;
  });
  return word(s, name);
}

// The node of this operator, which autograd has just made, if it made one: the first to come has it.
void note_node(State& s, const Event& e) {
  const auto made = at::sequence_number::peek();
  if (!made || made == s.last_node) return;
  s.last_node = made;
  s.forward.emplace(made - 1, std::make_pair(e.line, e.module));
}

// The line that waits for the backward that runs: looked for once.
int64_t waiting_line(State& s, Lock& lock) {
  const auto task = torch::autograd::get_current_graph_task_id();
  if (task == s.task) return s.task_line;
  PyCodeObject* code = nullptr;
  int number = 0;
  with_python(s, lock, [&] {
    const auto line = s.python.attr("waiting_line")();
    if (line.is_none()) return;
    code = reinterpret_cast<PyCodeObject*>(py::object(line[py::int_(0)]).release().ptr());
    number = line[py::int_(1)].cast<int>();
  });
  s.task = task;
  s.task_line = -1;
  if (code) {
    s.notes.lines.emplace_back(code, number);
    s.task_line = s.line_count++;
  }
  return s.task_line;
}

void locate(State& s, Lock& lock, Event& e) {
  const auto where = look(s, lock);
  e.generated = where.generated;
  if (where.generated) with_python(s, lock, [&] { s.python.attr("compiled_frame")(); });
  if (torch::autograd::get_current_graph_task_id() == -1) {
    e.line = where.line;
    e.module = where.module;
    e.optimizing = s.optimizing;
    if (where.module >= 0 && !s.optimizing) e.phase = FORWARD;
    note_node(s, e);
    return;
  }
  e.phase = BACKWARD;
  bool of_forward = false;  // whether a node runs that an operator of the forward made
  if (auto node = torch::autograd::get_current_node()) {
    e.node = node_word(s, lock, *node);
    of_forward = true;
    if (auto at = s.forward.find(node->sequence_nr()); at != s.forward.end())
      std::tie(e.line, e.module) = at->second;
    if (s.nodes[typeid(*node).name()].leaf) {
      of_forward = false;
      const auto name = of(s, static_cast<torch::autograd::AccumulateGrad&>(*node).variable).name;
      e.module = name < 0 ? -1 : s.owners[name];
    }
  }
  if (where.module >= 0) {  // a forward computed again, by checkpointing
    e.line = where.line;
    e.module = where.module;
  } else {
    e.inside = where.line;
  }
  if (e.line < 0 && !of_forward) e.line = waiting_line(s, lock);
  if (PyThread_get_thread_ident() == s.thread) note_node(s, e);
}

// ---- an operator ----

const Operator& known(State& s, Lock& lock, const c10::OperatorHandle& handle) {
  const void* schema = &handle.schema();
  if (auto at = s.operators.find(schema); at != s.operators.end()) return *at->second;
  const auto& name = handle.operator_name();
  auto op = std::make_unique<Operator>();
  with_python(s, lock, [&] {
    py::tuple facts = s.python.attr("operator")(name.name, name.overload_name);
    op->number = facts[0].cast<int64_t>();
    op->flags = facts[1].cast<int>();
    op->view = facts[2].cast<int>();
    op->writes = facts[3].cast<std::vector<int64_t>>();
    op->overwrites = facts[4].cast<std::vector<int64_t>>();
  });
  for (const auto& argument : handle.schema().arguments()) {
    auto type = argument.real_type();
    while (auto inner = type->cast<c10::OptionalType>()) type = inner->getElementType();
    op->kinds.push_back(type->kind());
    op->defaults.push_back(argument.default_value());
  }
  return *s.operators.emplace(schema, std::move(op)).first->second;
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

// What is known of an operator while it runs, without the state.
struct Call {
  const State* run = nullptr;  // the recording that it belongs to; compared, never read
  const Operator* op = nullptr;
  Event event;
  struct Source {  // the first input
    int64_t number = -1, count = 0;
    at::ScalarType dtype = at::kFloat;
    bool asked = false;
  } source;
  Few<int64_t, 8> inputs;
  Few<Fact, 4> facts;
  bool quotient = false;  // of an optimizer, by a tensor
  Few<Tensor, 2> writes, all;  // `all` only of operators of compiled code, which are not noted
};

// Whether the operator is noted: `after` is called when it has run.
bool before(State& s, Lock& lock, Call& call, const c10::OperatorHandle& handle, const IValue* args, size_t count) {
  const auto& op = known(s, lock, handle);
  if (op.flags & SILENT) return false;
  auto& e = call.event;
  call.run = &s;
  call.op = &op;
  e.op = op.number;
  e.step = s.step;
  locate(s, lock, e);
  if (e.generated) {
    for (size_t at = 0; at < count; at++) tensors_in(args[at], [&](const Tensor& t) { call.all.push_back(t); });
    return true;
  }
  if (s.optimizing && (op.flags & (DIVIDES | DIVIDES_TWO))) {
    int tensors = 0;
    for (size_t at = 0; at < count; at++) tensors_in(args[at], [&](const Tensor&) { tensors++; });
    call.quotient = tensors > ((op.flags & DIVIDES_TWO) ? 1 : 0);
  }
  const bool measuring = !(op.view || (op.flags & ALIASES) || s.names) && (!s.optimizing || s.full || call.quotient);
  Few<const at::TensorImpl*, 4> overwritten;
  for (auto at : op.overwrites)
    tensors_in(args[at], [&](const Tensor& t) { overwritten.push_back(t.unsafeGetTensorImpl()); });
  bool grad = false;
  for (size_t at = 0; at < count; at++) {
    const bool any = tensors_in(args[at], [&](const Tensor& t) {
      grad |= t.requires_grad();
      for (auto* other : overwritten)
        if (other == t.unsafeGetTensorImpl()) return;
      auto* made_by = t.requires_grad() ? torch::autograd::impl::grad_fn_unsafe(t) : nullptr;
      auto* place = entry(s, t);
      auto& v = of(s, t, place);
      const auto number = v.number;
      if (call.inputs.empty()) call.source = {number, v.count, v.dtype, v.asked || measuring};
      call.inputs.push_back(number);
      if (v.asked) return;
      if (measuring) ask(s, lock, v, t);
      if (made_by) node_word(s, lock, *made_by);  // tells Python of those of compiled functions
    });
    if (!any && !at_default(args[at], op.defaults[at]))
      call.facts.emplace_back(at, is_number(args[at]) ? number_of(args[at].toTensor()) : args[at]);
  }
  for (auto at : op.writes)
    tensors_in(args[at], [&](const Tensor& t) {
      call.writes.push_back(t);
      if (auto* place = entry(s, t); place && place->batch == s.batch) flush(s, lock);
    });
  if (e.phase == OTHER && !s.optimizing && at::GradMode::is_enabled()) e.phase = grad ? FORWARD : OTHER;
  return true;
}

void link(State& s, Value& v, const Call& call, const Tensor& t) {
  // A view with the elements of its source has the statistics of its source.
  const auto& source = call.source;
  if (v.asked || v.number == source.number || !source.asked || source.dtype != v.dtype) return;
  const auto view = call.op->view;
  const int64_t elements = t.numel(), from = source.count;
  if (from == 0 || elements % from || (view != EXPANDED && elements != from)) return;
  const bool ordered = view == ORDERED || (elements == 1 && from == 1) || (view == EXPANDED && elements == from);
  if (s.full && !ordered) return;
  v.asked = true;
  s.notes.links.push_back({v.number, source.number, elements / from, ordered});
}

// The event of an operator that has run, with what was noted of it.
void append(State& s, Call& call, c10::ArrayRef<int64_t> outputs) {
  auto& notes = s.notes;
  auto& e = call.event;
  e.inputs = kept(notes.numbers, call.inputs);
  e.outputs = kept(notes.numbers, outputs);
  e.facts = {static_cast<uint32_t>(notes.facts.size()), static_cast<uint32_t>(call.facts.size())};
  for (auto& fact : call.facts) notes.facts.push_back(std::move(fact));
  notes.events.push_back(std::move(e));
}

void after(State& s, Lock& lock, Call& call, const IValue* outs, size_t count) {
  const auto& op = *call.op;
  if (call.event.generated) {
    // Kernels that are not seen run between the operators of compiled code: what was measured may not last.
    for (const auto& t : call.all) written(s, t);
    for (size_t at = 0; at < count; at++) tensors_in(outs[at], [&](const Tensor& t) { written(s, t); });
    return;
  }
  for (const auto& t : call.writes) written(s, t);
  Few<int64_t, 8> outputs;
  const auto note = [&](const Tensor& t) {
    auto* place = op.flags & MEMORY ? written(s, t, true) : entry(s, t);
    auto& v = of(s, t, place);
    outputs.push_back(v.number);
    if (op.view && call.writes.empty()) {
      link(s, v, call, t);
    } else if (!(op.flags & (MEMORY | ALIASES | ASYNCHRONOUS)) && !s.names) {
      // Of what an optimizer keeps only parameters, shards of which have names, and quotients count at level fast.
      if (s.full || !s.optimizing || call.quotient || v.name >= 0 || (t.is_leaf() && t.requires_grad()))
        ask(s, lock, v, t);
    }
  };
  for (size_t at = 0; at < count; at++) tensors_in(outs[at], note);
  for (const auto& t : call.writes) {
    bool returned = false;
    for (size_t at = 0; at < count; at++)
      tensors_in(outs[at], [&](const Tensor& other) { returned |= other.is_same(t); });
    if (!returned) note(t);
  }
  append(s, call, outputs);
}

// Calls `what` with the state, unless the recording has ended; an error of the book-keeping must not end the run.
template <class What> void guarded(const What& what) {
  try {
    Lock lock(mutex);
    if (recording) what(*state, lock);
  } catch (const Ended&) {
  } catch (py::error_already_set& error) {
    Gil gil;
    if (state && state->python.attr("lost")(error.value()).cast<bool>()) throw;
  } catch (const std::exception& error) {
    Gil gil;
    PyErr_Clear();
    if (state) state->python.attr("lost")(py::str(error.what()));
  }
}

void failed(Call& call, const char* kind, const std::string& said) {
  Gil gil;
  py::error_scope kept;  // an error of Python's own is on its way
  guarded([&](State& s, Lock& lock) {
    if (call.run != &s) return;
    append(s, call, {});
    const auto at = s.notes.events.size() - 1;
    with_python(s, lock, [&] { s.python.attr("failed")(at, kind, said); });
  });
}

const char* kind_of(const c10::Error& error) {
  if (dynamic_cast<const c10::IndexError*>(&error)) return "IndexError";
  if (dynamic_cast<const c10::ValueError*>(&error)) return "ValueError";
  if (dynamic_cast<const c10::TypeError*>(&error)) return "TypeError";
  if (dynamic_cast<const c10::NotImplementedError*>(&error)) return "NotImplementedError";
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) ? "OutOfMemoryError" : "RuntimeError";
}

bool made_of_others(const IValue* args, size_t count) {
  bool found = false;
  for (size_t at = 0; at < count && !found; at++)
    tensors_in(args[at], [&](const Tensor& t) {
      if (found || !t.key_set().has(c10::DispatchKey::Python)) return;
      Gil gil;
      auto wrapped = py::cast(t);
      found = state && state->python.attr("made_of_others")(py::type::of(wrapped)).cast<bool>();
    });
  return found;
}

void record(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, KEY);
  auto& thread = of_thread;
  if (!recording || thread.quiet) return handle.redispatchBoxed(below, stack);
  const auto& schema = handle.schema();
  const size_t count = schema.arguments().size(), returns = schema.returns().size();
  const auto* args = stack->data() + stack->size() - count;
  // Tensors that are made of others (DTensor) go first, so that what they do inside is seen.
  if (made_of_others(args, count)) return handle.redispatchBoxed(below, stack);
  c10::impl::ExcludeDispatchKeyGuard guard(KEY);
  Call call;
  {
    frames::Hold frames;
    guarded([&](State& s, Lock& lock) {
      if (!before(s, lock, call, handle, args, count)) call.op = nullptr;
    });
  }
  if (!call.op) return handle.redispatchBoxed(below, stack);
  auto* outer = thread.current;
  thread.current = &call.event;
  try {
    handle.redispatchBoxed(below, stack);
  } catch (const c10::Error& error) {
    thread.current = outer;
    failed(call, kind_of(error), error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    thread.current = outer;
    failed(call, "RuntimeError", error.what());
    throw;
  }
  thread.current = outer;
  bool many = false;
  guarded([&](State& s, Lock& lock) {
    if (call.run != &s) return;
    after(s, lock, call, stack->data() + stack->size() - returns, returns);
    many = s.notes.events.size() >= MOST_EVENTS;
  });
  if (!many) return;
  Gil gil;
  if (state) state->python.attr("many")();
}

// ---- kernels beside operators ----

// A kernel that is launched beside operators; the call is what both functions know of it.
void launching(int64_t op, const std::vector<Tensor>& tensors, Call& call) {
  frames::Hold frames;
  Lock lock(mutex);
  TORCH_CHECK(state, "no tape is at work");
  State& s = *state;
  flush(s, lock);  // what the kernel may write to is measured before
  auto& e = call.event;
  e.op = op;
  e.step = s.step;
  locate(s, lock, e);
  bool grad = false;
  for (const auto& t : tensors) grad |= t.requires_grad();
  if (e.phase == OTHER && grad && at::GradMode::is_enabled()) e.phase = FORWARD;
  for (const auto& t : tensors) {
    auto& v = of(s, t);
    call.inputs.push_back(v.number);
    if (!s.names) ask(s, lock, v, t);
  }
  flush(s, lock);
}

py::list launched(const std::vector<Tensor>& tensors, Call& call, const std::string& name) {
  Lock lock(mutex);
  TORCH_CHECK(state, "no tape is at work");
  State& s = *state;
  Few<int64_t, 8> outputs, fresh;
  for (size_t at = 0; at < tensors.size(); at++) {
    const auto& t = tensors[at];
    auto* place = entry(s, t);
    const bool unwritten = place && place->unwritten;
    auto& v = of(s, t, written(s, t));
    if (unwritten) fresh.push_back(v.number);
    outputs.push_back(v.number);
    if (call.inputs[at] != v.number && !s.names) ask(s, lock, v, t);
  }
  call.event.kernels = std::make_unique<std::vector<std::string>>(1, name);
  append(s, call, outputs);
  lock.unlock();
  py::list told;
  for (auto number : fresh) told.append(number);
  return told;
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

py::tuple numbers(const Notes& notes, Range range) {
  return numbers(c10::ArrayRef<int64_t>(notes.numbers.data() + range.begin, range.count));
}

py::tuple event(const Notes& notes, const Event& e, const Table<int64_t, const Operator*>& by) {
  auto op = by.find(e.op);
  py::tuple facts(e.facts.count);
  for (size_t at = 0; at < e.facts.count; at++) {
    const auto& [position, value] = notes.facts[e.facts.begin + at];
    const auto kind = op == by.end() ? at::TypeKind::NoneType : op->second->kinds.at(position);
    facts[at] = py::make_tuple(position, fact(value, kind));
  }
  return py::make_tuple(
      e.op, e.step, e.phase, e.line, e.inside, e.module, e.node, facts, numbers(notes, e.inputs),
      numbers(notes, e.outputs), e.kernels ? py::cast(*e.kernels) : py::object(py::list()), e.optimizing);
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

// Memory of what Python has taken, for what comes: the system gives new pages slowly.
void give_back(Notes& notes) {
  notes.events.clear();
  notes.facts.clear();
  notes.numbers.clear();
  notes.made.clear();
  notes.rows.clear();
  Lock lock(mutex);
  if (!state || !state->notes.events.empty() || !state->notes.made.empty()) return;
  std::swap(notes.events, state->notes.events);
  std::swap(notes.facts, state->notes.facts);
  std::swap(notes.numbers, state->notes.numbers);
  std::swap(notes.made, state->notes.made);
  std::swap(notes.rows, state->notes.rows);
}

py::tuple drain() {
  Notes notes;
  Table<int64_t, const Operator*> by;
  std::vector<std::string> texts;
  {
    Lock lock(mutex);
    flush(*state, lock);
    // Taken away: what is made of it here may run Python's finalizers, and other threads operators.
    std::swap(notes, state->notes);
    for (const auto& [address, op] : state->operators) by[op->number] = op.get();
    texts = state->texts;
  }
  const auto text = [&](int64_t word) { return word < 0 ? py::str("") : py::str(texts[word]); };
  py::list made, events, links, lines, words, renamed;
  for (const auto& v : notes.made)
    made.append(py::make_tuple(
        v.number, v.storage, v.offset, numbers(notes, v.sizes),
        py::reinterpret_borrow<py::object>((PyObject*)torch::getTHPDtype(v.dtype)), v.device.str(), text(v.name)));
  for (const auto& e : notes.events) events.append(event(notes, e, by));
  py::dict rows;
  const auto exponents = state->python.attr("exponents");
  for (const auto& [number, r] : notes.rows) rows[py::int_(number)] = row(r, exponents);
  for (const auto& l : notes.links) links.append(py::make_tuple(l.number, l.source, l.repeats, l.ordered));
  for (const auto& [code, line] : notes.lines)
    lines.append(py::make_tuple(py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(code)), line));
  for (const auto& text : notes.words) words.append(py::bytes(text));
  for (const auto& [number, word] : notes.renamed) renamed.append(py::make_tuple(number, text(word)));
  give_back(notes);
  return py::make_tuple(made, rows, events, links, lines, words, renamed);
}

// ---- begin, end, between steps ----

void begin(py::object engine, bool names, bool full, const std::string& kind, int64_t few_bytes,
           int64_t most_bytes) {
  Lock lock(mutex);
  TORCH_CHECK(!state, "another tape is at work");
  state = std::make_unique<State>();
  state->python = std::move(engine);
  state->names = names;
  state->full = full;
  state->kind = at::Device(kind).type();
  state->few_bytes = few_bytes;
  state->most_bytes = most_bytes;
  state->thread = PyThread_get_thread_ident();
  recording = true;
  c10::impl::tls_set_dispatch_key_included(KEY, true);
}

void finish() {
  c10::impl::tls_set_dispatch_key_included(KEY, false);
  std::unique_ptr<State> old;
  {
    Lock lock(mutex);
    recording = false;
    old = std::move(state);
  }
  if (!old) return;
  for (auto& [code, role] : old->roles) Py_DECREF(code);
  for (auto& [code, line] : old->notes.lines) Py_DECREF(code);
}

c10::StorageImpl* storage_of(const Tensor& t) {
  return t.layout() == at::kStrided && t.has_storage() ? t.storage().unsafeGetStorageImpl() : nullptr;
}

// Names of parameters and buffers, by the storages in which they lie now: FSDP moves them.
void place_names(State& s) {
  const auto here = [&](const auto& pair, auto* before) { return storage_of(pair.second) == before; };
  if (std::equal(s.named.begin(), s.named.end(), s.named_at.begin(), s.named_at.end(), here)) return;
  for (const auto& [address, name] : s.parameters)
    if (auto at = s.storages.find(address); at != s.storages.end()) at->second->name = Name();
  s.parameters.clear();
  s.named_at.clear();
  for (const auto& [text, t] : s.named) {
    auto* storage = s.named_at.emplace_back(storage_of(t));
    if (!storage) continue;
    const Name name{static_cast<int32_t>(word(s, text)), t.numel()};
    if (!s.parameters.emplace(storage, name).second) continue;
    auto at = s.storages.find(storage);
    if (at == s.storages.end()) continue;
    at->second->name = name;
    for (auto& v : at->second->values)
      if (v.count == name.count && v.name != name.word) {
        v.name = name.word;
        s.notes.renamed.emplace_back(v.number, name.word);
      }
  }
}

void name(std::vector<std::pair<std::string, Tensor>> tensors, const py::dict& modules) {
  std::vector<std::pair<PyObject*, std::string>> paths;
  for (auto [module, name] : modules)
    paths.emplace_back(reinterpret_cast<PyObject*>(module.cast<int64_t>()), name.cast<std::string>());
  Lock lock(mutex);
  State& s = *state;
  s.named.swap(tensors);  // the former ones go without the mutex
  s.named_at.clear();
  place_names(s);
  s.owners.clear();
  for (const auto& [text, t] : s.named) {
    const auto end = text.rfind('.');
    s.owners[word(s, text)] = word(s, end == std::string::npos ? "" : text.substr(0, end));
  }
  s.modules.clear();
  for (const auto& [module, path] : paths) s.modules[module] = word(s, path);
  lock.unlock();
}

void begin_step(int64_t step) {
  Lock lock(mutex);
  State& s = *state;
  s.step = step;
  if (s.forward.size() > MOST_NODES) {
    s.forward.clear();
    s.last_node = 0;
  }
  place_names(s);
}

// The number of the next value, and those before it that an operator may still name.
py::tuple live() {
  std::vector<int64_t> all;
  int64_t next = 0;
  {
    Lock lock(mutex);
    sweep(*state, state->pool.size());
    next = state->numbers;
    for (const auto& [address, place] : state->storages)
      for (const auto& v : place->values) all.push_back(v.number);
  }
  py::set numbers;
  for (auto number : all) numbers.add(py::int_(number));
  return py::make_tuple(next, numbers);
}

// A function of Python that reads or sets something of the state, if there is one.
template <class What> void locked(const What& what) {
  Lock lock(mutex);
  if (state) what(*state);
}

}  // namespace

PYBIND11_MODULE(retrograd_trace_tape, m) {
  // For the life of the process: operators may be under way when a recorder ends.
  static auto fallback = c10::Dispatcher::singleton().registerFallback(
      KEY, c10::KernelFunction::makeFromBoxedFunction<&record>(), "retrograd.trace.tape");
  py::class_<Call>(m, "Call").def(py::init<>());
  m.def("begin", &begin);
  m.def("end", &finish);
  m.def("name", &name);
  m.def("step", &begin_step);
  m.def("live", &live);
  m.def("drain", &drain);
  m.def("flush", [] {
    Lock lock(mutex);
    flush(*state, lock);
  });
  // Before torch 2.13 whatever runs inside a tensor's own __torch_dispatch__ is hidden from keys above Python's.
  m.attr("above_python") = KEY > c10::DispatchKey::Python;
  m.def("at_work", [] { return state != nullptr; });
  m.def("count", [] {
    size_t count = 0;
    locked([&](State& s) { count = s.notes.events.size(); });
    return count;
  });
  m.def("stop", [] { recording = false; });
  m.def("optimizing", [](bool now) { locked([&](State& s) { s.optimizing = now; }); });
  m.def("written", [](const std::vector<Tensor>& tensors) {
    locked([&](State& s) {
      for (const auto& t : tensors) written(s, t);
    });
  });
  m.def("quiet", [](bool now) { of_thread.quiet += now ? 1 : -1; });
  m.def("in_operator", [] { return of_thread.current != nullptr; });
  m.def("kernel", [](const std::string& name) {
    auto& kernels = of_thread.current->kernels;
    if (!kernels) kernels = std::make_unique<std::vector<std::string>>();
    kernels->push_back(name);
  });
  m.def("launching", &launching);
  m.def("launched", &launched);
  m.def("measure", [](const Tensor& t, bool exponents, int bytes, py::object kind) {
    TORCH_CHECK(t.is_cpu() && t.is_contiguous() && measure::takes(t.scalar_type()), "not measured here");
    return row(measure::widest(bytes)(t.scalar_type(), t.const_data_ptr(), t.numel(), exponents), kind);
  });
}
