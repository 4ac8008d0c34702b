// The eager path of the norms without Python: autograd node, allocations and launches of kernels that Triton has
// compiled. Knows no formula: what is launched with which arguments is told by recipes.py, in the order used here.
//
// Fits torch 2.11 to 2.13. No CUDA headers: the three driver functions are looked up in libcuda.so.1.

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SequenceNumber.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/empty.h>
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
#include <unordered_map>
#include <vector>

namespace {

using at::ScalarType;
using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePtr = decltype(std::declval<Node&>().getptr());
using Shape = c10::SmallVector<int64_t, 5>;

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
};

struct Recipe {
  Launch rows;      // the norm, or its gradient
  Launch finalize;  // adds up the parts; no function where there are none
  int64_t parts = 0;
};

// Numbers that say what a recipe was recorded for; recipes.py writes the same ones.
struct Key {
  static constexpr int kMost = 32;
  int length = 0;
  std::array<int64_t, kMost> words;

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
  PyObject* fallback = nullptr;  // a backward that no recipe fits
  PyObject* knobs = nullptr;     // triton.knobs.runtime
  PyObject* hook_name = nullptr;
  PyObject* calls_name = nullptr;
  PyObject* triton = nullptr;  // Impl.TRITON
  bool by_default = false;     // whether impl=None chooses it
  std::string refusal;
  Recipes forward, backward;
};

// Never destroyed: threads of the autograd engine may outlive static objects.
State& state() {
  static State* made = new State;
  return *made;
}

void launch(const Launch& what, uint64_t* slots, c10::Device device) {
  State& held = state();
  void* stream = nullptr;
  if (held.stream != nullptr) {
    const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    stream = held.stream(&current);
  }
  if (held.context != nullptr) {
    // A thread of the engine has no context before its first call of the runtime.
    void* context = nullptr;
    held.context(&context);
    if (context == nullptr && held.retain(&context, device.index()) == 0) held.set_context(context);
  }
  constexpr size_t kMost = 64;
  void* params[kMost + 2];
  uint64_t scratch = 0;
  size_t count = 0;
  for (const Param& param : what.params) {
    params[count++] = param.slot < 0 ? const_cast<uint64_t*>(&param.value) : &slots[param.slot];
  }
  params[count++] = &scratch;  // Triton's global scratch
  params[count++] = &scratch;  // and its profiler's
  LaunchAttribute attribute = {kProgrammaticStreamSerialization, {}, {1}};
  const LaunchConfig config = {
      {what.grid[0], what.grid[1], what.grid[2]}, {what.threads, 1, 1}, what.shared, stream, &attribute, what.pdl};
  const int code = held.launch(&config, what.function, params, nullptr);
  if (code != 0) {
    throw std::runtime_error("a kernel of retrograd was not launched: CUDA driver error " + std::to_string(code));
  }
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

// [..., N] as Tensor.flatten(0, -2) makes it [M, N]; false where that copies.
bool add_rows(Key& key, const Tensor& t) {
  if (!t.defined()) {
    key.add(0);
    return true;
  }
  const auto sizes = t.sizes(), strides = t.strides();
  const int64_t n = sizes.back();
  key.add(head(t.scalar_type(), 2));
  if (t.numel() == 0) return false;
  const int64_t rows = t.numel() / n;
  key.add(rows);
  key.add(n);
  if (sizes.size() == 2) {
    key.add(strides[0]);
    key.add(strides[1]);
  } else if (sizes.size() == 1) {
    key.add(n * strides[0]);
    key.add(strides[0]);
  } else if (t.is_contiguous()) {
    key.add(n);
    key.add(1);
  } else {
    const std::array<int64_t, 2> flat = {rows, n};
    const auto found = at::detail::computeStride(sizes, strides, at::IntArrayRef(flat));
    if (!found.has_value()) return false;
    key.add((*found)[0]);
    key.add((*found)[1]);
  }
  return true;
}

// [N] or [H, N]; a single head needs no dimension.
void add_vector(Key& key, const Tensor& t) {
  if (!t.defined()) {
    key.add(0);
    return;
  }
  const size_t first = t.dim() == 2 && t.size(0) == 1 ? 1 : 0;
  key.add(head(t.scalar_type(), t.dim() - static_cast<int64_t>(first)));
  for (size_t i = first; i < static_cast<size_t>(t.dim()); ++i) key.add(t.size(i));
  for (size_t i = first; i < static_cast<size_t>(t.dim()); ++i) key.add(t.stride(i));
}

bool vector_fits(const Tensor& vector, const Tensor& x) {
  if (!vector.defined()) return true;
  if (vector.dim() == 1) return vector.size(0) == x.sizes().back();
  return vector.dim() == 2 && x.dim() > 2 && vector.sizes() == x.sizes().slice(x.dim() - 2);
}

uint64_t address(const Tensor& t) { return t.defined() ? reinterpret_cast<uint64_t>(t.const_data_ptr()) : 0; }

Tensor make(at::IntArrayRef shape, ScalarType dtype, c10::Device device) {
  return at::empty(shape, at::TensorOptions(dtype).device(device));
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

// ---- The nodes -----------------------------------------------------------------------------------------------------

struct Spec {
  bool centered;
  double eps, offset;
  int64_t parts;  // -1: chosen by GPU

  void add_to(Key& key) const {
    key.add(centered);
    key.add_bits(eps);
    key.add_bits(offset);
    key.add(parts);
  }
};

// Stands where a gradient comes from that cannot be differentiated.
struct OnceOnly final : Node {
  variable_list apply(variable_list&&) override { throw std::runtime_error(state().refusal); }
  std::string name() const override { return "_OnceOnlyBackward"; }
};

constexpr int kX = 0, kWeight = 1, kBias = 2, kResidual = 3;

struct NormBackward final : Node {
  Spec spec{};
  c10::Device device{c10::kCPU};
  Shape shape, vector_shape;
  bool has_vector = false;
  int64_t heads = 1;
  std::array<int, 4> dtypes{-1, -1, -1, -1};  // of x, weight, bias, residual; -1: not given
  SavedVariable s, weight, mean, rstd;

  std::string name() const override { return "NormFunctionBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* kept : {&s, &weight, &mean, &rstd}) kept->reset_data();
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    throw std::runtime_error(
        "compiled autograd cannot trace the C++ path of retrograd's norms; set RETROGRAD_HOST=off before the forward");
  }

  variable_list apply(variable_list&& grads) override {
    const bool again = torch::autograd::GradMode::is_enabled();
    const Tensor& grad_y = grads[0];
    const Tensor grad_s = grads.size() > 1 ? grads[1] : Tensor();
    Saved saved;
    variable_list results;
    {
      at::AutoGradMode no_grad(false);
      if (!grad_y.defined()) {
        results = of_s_alone(grad_s);
        if (again) saved = unpack();
      } else {
        saved = unpack();
        results = launched(grad_y, grad_s, saved);
        if (results.empty()) results = by_python(grad_y, grad_s, saved);
      }
    }
    return again ? guarded(std::move(results), grad_y, grad_s, saved) : results;
  }

 private:
  struct Saved {
    Tensor s, weight, mean, rstd;
  };

  bool needs(int input) const { return should_compute_output(input); }
  int wanted(int input) const { return needs(input) ? dtypes[input] : -1; }

  Saved unpack() {
    std::lock_guard<std::mutex> lock(mutex_);
    const NodePtr self = getptr();
    return {s.unpack(self), weight.unpack(self), mean.unpack(self), rstd.unpack(self)};
  }

  variable_list of_s_alone(const Tensor& grad_s) const {
    variable_list results(4);
    if (!grad_s.defined()) return results;
    for (int input : {kX, kResidual}) {
      if (needs(input)) results[input] = grad_s.to(static_cast<ScalarType>(dtypes[input]));
    }
    return results;
  }

  // Empty where no recipe fits.
  variable_list launched(const Tensor& grad_y, const Tensor& grad_s, const Saved& saved) const {
    if (!saved.s.defined() || !saved.rstd.defined() || !unwatched()) return {};
    uint64_t all = 0;
    for (const Tensor* t : {&grad_y, &grad_s, &saved.s, &saved.weight, &saved.mean, &saved.rstd}) {
      if (t->defined() && !plain(*t, device, all)) return {};
    }
    if (all % 16 != 0 || grad_y.sizes() != at::IntArrayRef(shape) || saved.s.sizes() != at::IntArrayRef(shape)) {
      return {};
    }
    if (grad_s.defined() && grad_s.sizes() != at::IntArrayRef(shape)) return {};
    if (saved.mean.defined() != spec.centered) return {};
    const int64_t n = shape.back(), rows = saved.s.numel() / std::max<int64_t>(n, 1);
    for (const Tensor* t : {&saved.mean, &saved.rstd}) {
      if (t->defined() && (t->scalar_type() != at::kFloat || t->numel() != rows || !t->is_contiguous())) return {};
    }
    Key key;
    key.add(device.index());
    if (!add_rows(key, saved.s) || !add_rows(key, grad_y)) return {};
    add_vector(key, saved.weight);
    if (!add_rows(key, grad_s)) return {};
    for (int input : {kX, kResidual, kWeight, kBias}) key.add(wanted(input));
    key.add(heads);
    spec.add_to(key);
    const auto recipe = state().backward.find(key);
    if (recipe == nullptr) return {};
    c10::OptionalDeviceGuard guard(device);
    return run(*recipe, grad_y, grad_s, saved, n);
  }

  variable_list run(const Recipe& recipe, const Tensor& grad_y, const Tensor& grad_s, const Saved& saved,
                    int64_t n) const {
    variable_list results(4);
    const bool shared = wanted(kResidual) >= 0 && wanted(kResidual) == wanted(kX);
    Tensor own_residual, parts[2];
    if (needs(kX)) results[kX] = make(shape, static_cast<ScalarType>(dtypes[kX]), device);
    if (needs(kResidual) && !shared) {
      own_residual = make(shape, static_cast<ScalarType>(dtypes[kResidual]), device);
    }
    results[kResidual] = shared ? results[kX] : own_residual;
    for (int i : {0, 1}) {
      if (needs(kWeight + i)) parts[i] = make({recipe.parts, heads * n}, at::kFloat, device);
    }
    uint64_t slots[] = {address(grad_y),      address(saved.s), address(saved.weight), address(saved.mean),
                        address(saved.rstd),  address(grad_s),  address(results[kX]),  address(own_residual),
                        address(parts[0]),    address(parts[1])};
    launch(recipe.rows, slots, device);
    if (recipe.finalize.function != nullptr) {
      for (int i : {0, 1}) {
        if (parts[i].defined()) {
          results[kWeight + i] = make(vector_shape, static_cast<ScalarType>(dtypes[kWeight + i]), device);
        }
      }
      uint64_t sums[] = {address(parts[0]), address(parts[1]), address(results[kWeight]), address(results[kBias])};
      launch(recipe.finalize, sums, device);
    }
    return results;
  }

  variable_list by_python(const Tensor& grad_y, const Tensor& grad_s, const Saved& saved) const {
    WithGil gil;
    auto wrap = [](const Tensor& t) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(t)); };
    auto sizes = [](const Shape& from) {
      py::tuple made(from.size());
      for (size_t i = 0; i < from.size(); ++i) made[i] = from[i];
      return made;
    };
    py::tuple results;
    try {
      results = py::reinterpret_borrow<py::object>(state().fallback)(
          py::make_tuple(wrap(grad_y), wrap(grad_s)),
          py::make_tuple(wrap(saved.s), wrap(saved.weight), wrap(saved.mean), wrap(saved.rstd)),
          py::make_tuple(needs(0), needs(1), needs(2), needs(3)),
          py::make_tuple(dtypes[0], dtypes[1], dtypes[2], dtypes[3]), sizes(shape),
          has_vector ? py::object(sizes(vector_shape)) : py::object(py::none()), heads,
          py::make_tuple(spec.centered, spec.eps, spec.offset, spec.parts));
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

  // create_graph=True: the gradients are handed out behind a node that says why it cannot go on.
  static variable_list guarded(variable_list&& results, const Tensor& grad_y, const Tensor& grad_s,
                               const Saved& saved) {
    const Tensor leaves[] = {grad_y, grad_s, saved.s, saved.weight, saved.mean, saved.rstd};
    bool any = false;
    for (const Tensor& leaf : leaves) any = any || (leaf.defined() && leaf.requires_grad());
    if (!any) return std::move(results);
    auto node = make_node<OnceOnly>();
    node->set_next_edges(
        torch::autograd::collect_next_edges(leaves[0], leaves[1], leaves[2], leaves[3], leaves[4], leaves[5]));
    for (Tensor& result : results) {
      if (!result.defined()) continue;
      result = result.detach();
      torch::autograd::set_history(result, NodePtr(node));
    }
    return std::move(results);
  }
};

// ---- The forward ---------------------------------------------------------------------------------------------------

struct Call {
  const Tensor &x, &weight, &bias, &residual;
  Spec spec;
  c10::Device device;
  ScalarType out_dtype, s_dtype;
  bool prenorm = false;
  bool own_s = false, store_s = false;  // s is not x for the caller; s is written
  bool need = false, stats = false;     // there is a backward; it reads mean and rstd
};

struct Results {
  Tensor y, s, mean, rstd;
};

Results forward(const Call& call, const Recipe& recipe) {
  RECORD_FUNCTION("NormFunction", c10::ArrayRef<const c10::IValue>{}, at::sequence_number::peek());
  Results made;
  made.y = make(call.x.sizes(), call.out_dtype, call.device);
  if (call.store_s) made.s = make(call.x.sizes(), call.s_dtype, call.device);
  if (call.stats) {
    const int64_t rows = call.x.numel() / call.x.sizes().back();
    made.rstd = make({rows}, at::kFloat, call.device);
    if (call.spec.centered) made.mean = make({rows}, at::kFloat, call.device);
  }
  uint64_t slots[] = {address(call.x), address(call.residual), address(call.weight), address(call.bias),
                      address(made.y), address(made.s),        address(made.mean),   address(made.rstd)};
  launch(recipe.rows, slots, call.device);
  return made;
}

void connect(const Call& call, Results& made) {
  auto node = make_node<NormBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(call.x, call.weight, call.bias, call.residual));
  node->spec = call.spec;
  node->device = call.device;
  node->shape.assign(call.x.sizes().begin(), call.x.sizes().end());
  const Tensor& vector = call.weight.defined() ? call.weight : call.bias;
  if (vector.defined()) {
    node->has_vector = true;
    node->vector_shape.assign(vector.sizes().begin(), vector.sizes().end());
    node->heads = vector.dim() == 2 ? std::max<int64_t>(vector.size(0), 1) : 1;
  }
  const Tensor* inputs[] = {&call.x, &call.weight, &call.bias, &call.residual};
  for (int i = 0; i < 4; ++i) {
    if (inputs[i]->defined()) node->dtypes[i] = static_cast<int>(inputs[i]->scalar_type());
  }
  const NodePtr shared(node);
  torch::autograd::set_history(made.y, shared);
  // As a result, s stays tied to x and residual, so that a second derivative is noticed.
  if (made.s.defined()) torch::autograd::set_history(made.s, shared);
  if (!call.stats) return;
  node->s = made.s.defined() ? SavedVariable(made.s, true) : SavedVariable(call.x, false);
  // The weight scales grad_out on the way to x; the gradient of the weight itself does not need it.
  if (call.weight.defined() && (node->should_compute_output(kX) || node->should_compute_output(kResidual))) {
    node->weight = SavedVariable(call.weight, false);
  }
  if (made.mean.defined()) node->mean = SavedVariable(made.mean, false);
  node->rstd = SavedVariable(made.rstd, false);
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

bool is_triton(PyObject* impl) {
  if (impl == Py_None) return state().by_default;
  if (impl == state().triton) return true;
  return PyUnicode_CheckExact(impl) && PyUnicode_CompareWithASCIIString(impl, "triton") == 0;
}

bool read_parts(PyObject* given, int64_t& parts) {
  parts = -1;
  if (given == Py_None) return true;
  if (!PyLong_CheckExact(given)) return false;
  parts = PyLong_AsLongLong(given);
  if (parts == -1 && PyErr_Occurred()) PyErr_Clear();
  return parts >= 1;
}

enum Argument { X, WEIGHT, BIAS, RESIDUAL, EPS, PRENORM, RESIDUAL_DTYPE, OUT_DTYPE, OFFSET, DETERMINISTIC, PARTS,
                ACCUMULATE, IMPL, CENTERED, ARGUMENTS };

PyObject* not_implemented() { return Py_NewRef(Py_NotImplemented); }

PyObject* apply(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == ARGUMENTS, "apply takes ", static_cast<int>(ARGUMENTS), " arguments, got ", count);
  const Tensor *x, *weight, *bias, *residual;
  std::optional<ScalarType> residual_dtype, out_dtype;
  Spec spec{};
  if (args[X] == Py_None || !read_tensor(args[X], x) || !read_tensor(args[WEIGHT], weight) ||
      !read_tensor(args[BIAS], bias) || !read_tensor(args[RESIDUAL], residual) ||
      !read_dtype(args[RESIDUAL_DTYPE], residual_dtype) || !read_dtype(args[OUT_DTYPE], out_dtype) ||
      !read_parts(args[PARTS], spec.parts) || !PyFloat_CheckExact(args[EPS]) || !PyFloat_CheckExact(args[OFFSET]) ||
      args[DETERMINISTIC] != Py_True || args[ACCUMULATE] != Py_False || !PyBool_Check(args[PRENORM]) ||
      !is_triton(args[IMPL]) || x->device().type() != state().device_type || x->dim() == 0 || !unwatched()) {
    return not_implemented();
  }
  const c10::Device device = x->device();
  if (device.is_cuda() && c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice() != device) return not_implemented();
  uint64_t all = 0;
  for (const Tensor* t : {x, weight, bias, residual}) {
    if (t->defined() && !plain(*t, device, all)) return not_implemented();
  }
  if (all % 16 != 0 || !vector_fits(*weight, *x) || !vector_fits(*bias, *x) ||
      (weight->defined() && bias->defined() && weight->sizes() != bias->sizes()) ||
      (residual->defined() && residual->sizes() != x->sizes()) || hooked()) {
    return not_implemented();
  }
  spec.centered = args[CENTERED] == Py_True;
  spec.eps = PyFloat_AS_DOUBLE(args[EPS]);
  spec.offset = PyFloat_AS_DOUBLE(args[OFFSET]);
  const ScalarType x_dtype = x->scalar_type();
  Call call{*x, *weight, *bias, *residual, spec, device, out_dtype.value_or(x_dtype), x_dtype};
  call.prenorm = args[PRENORM] == Py_True;
  call.own_s = residual->defined() || residual_dtype.value_or(x_dtype) != x_dtype;
  call.s_dtype = residual_dtype.value_or(residual->defined() ? residual->scalar_type() : x_dtype);
  if (!residual->defined() && !call.prenorm && call.s_dtype == at::kFloat) call.s_dtype = x_dtype;  // nobody sees s
  const bool recorded = torch::autograd::GradMode::is_enabled();
  auto needs = [&](const Tensor& t) { return recorded && t.defined() && t.requires_grad(); };
  call.stats = needs(*x) || needs(*weight) || needs(*residual);
  call.need = call.stats || needs(*bias);
  call.store_s = ((call.prenorm && call.own_s) || call.stats) && (residual->defined() || call.s_dtype != x_dtype);

  Key key;
  key.add(device.index());
  if (!add_rows(key, *x) || !add_rows(key, *residual)) return not_implemented();
  add_vector(key, *weight);
  add_vector(key, *bias);
  key.add(static_cast<int64_t>(call.out_dtype));
  key.add(static_cast<int64_t>(call.s_dtype));
  key.add(call.store_s);
  key.add(call.stats);
  spec.add_to(key);
  const auto recipe = state().forward.find(key);
  if (recipe == nullptr) return not_implemented();

  Results made;
  {
    WithoutGil released;
    made = forward(call, *recipe);
    if (call.need) connect(call, made);
  }
  auto y = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(made.y)));
  if (!call.prenorm) return y.release().ptr();
  auto s = call.own_s ? py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(made.s)))
                      : py::reinterpret_borrow<py::object>(args[X]);
  return PyTuple_Pack(2, y.ptr(), s.ptr());
  END_HANDLE_TH_ERRORS
}

// ---- What recipes.py calls -----------------------------------------------------------------------------------------

Key read_key(py::handle given) {
  Key key;
  for (py::handle word : given) {
    TORCH_CHECK(key.length < Key::kMost, "a key has at most ", Key::kMost, " words");
    key.add(word.cast<int64_t>());
  }
  return key;
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
  return made;
}

PyObject* add(PyObject*, PyObject* args) {  // (is_backward, key, rows, finalize or None, parts)
  HANDLE_TH_ERRORS
  const auto given = py::reinterpret_borrow<py::tuple>(args);
  Recipe recipe;
  recipe.rows = read_launch(given[2]);
  if (!given[3].is_none()) recipe.finalize = read_launch(given[3]);
  recipe.parts = given[4].cast<int64_t>();
  Recipes& into = given[0].cast<bool>() ? state().backward : state().forward;
  into.add(read_key(given[1]), std::move(recipe));
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
  TORCH_CHECK_TYPE(THPDtype_Check(dtype), "expected a torch.dtype");
  return PyLong_FromLong(static_cast<long>(reinterpret_cast<THPDtype*>(dtype)->scalar_type));
  END_HANDLE_TH_ERRORS
}

PyObject* tell(PyObject*, PyObject* args) {  // (fallback, knobs or None, Impl.TRITON, is default, message)
  HANDLE_TH_ERRORS
  PyObject *fallback, *knobs, *triton;
  int by_default;
  const char* message;
  if (!PyArg_ParseTuple(args, "OOOps", &fallback, &knobs, &triton, &by_default, &message)) return nullptr;
  State& held = state();
  held.fallback = Py_NewRef(fallback);
  held.knobs = knobs == Py_None ? nullptr : Py_NewRef(knobs);
  held.triton = Py_NewRef(triton);
  held.by_default = by_default != 0;
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
  if (!held.launch || !held.context || !held.retain || !held.set_context) {
    return PyUnicode_FromString(
        "libcuda.so.1 lacks cuLaunchKernelEx, cuCtxGetCurrent, cuDevicePrimaryCtxRetain or cuCtxSetCurrent");
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
  held.device_type = c10::kCPU;
  held.allowed_keys = keys_of(c10::kCPU);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"apply", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(apply)), METH_FASTCALL, nullptr},
    {"add", add, METH_VARARGS, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"dtype_code", dtype_code, METH_O, nullptr},
    {"tell", tell, METH_VARARGS, nullptr},
    {"use_cuda", use_cuda, METH_NOARGS, nullptr},
    {"use_cpu", use_cpu, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "retrograd_norm_host", nullptr, -1, methods, nullptr, nullptr,
                          nullptr,               nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_retrograd_norm_host() { return PyModule_Create(&definition); }
