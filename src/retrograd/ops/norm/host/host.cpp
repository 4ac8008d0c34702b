// The eager norms: their arguments, autograd node and results. What is launched with which arguments is told by
// recipes.py, in the order used here.

#include "host.hpp"

#include <ATen/TensorUtils.h>

namespace {

// ---- What tensors have to be like ----------------------------------------------------------------------------------

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
        if (results.empty()) results = in_python(grad_y, grad_s, saved);
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
    return run(*recipe, grad_y, grad_s, saved);
  }

  variable_list run(const Recipe& recipe, const Tensor& grad_y, const Tensor& grad_s, const Saved& saved) const {
    variable_list results(4);
    const bool shared = wanted(kResidual) >= 0 && wanted(kResidual) == wanted(kX);
    Tensor own_residual;
    if (needs(kX)) results[kX] = make(shape, static_cast<ScalarType>(dtypes[kX]), device);
    if (needs(kResidual) && !shared) {
      own_residual = make(shape, static_cast<ScalarType>(dtypes[kResidual]), device);
    }
    results[kResidual] = shared ? results[kX] : own_residual;
    uint64_t slots[] = {address(grad_y),     address(saved.s), address(saved.weight), address(saved.mean),
                        address(saved.rstd), address(grad_s),  address(results[kX]),  address(own_residual),
                        0, 0, 0, 0};
    Tensor parts;  // sums that the last launch adds up: those of weight, then those of bias, or one of the two
    if (!recipe.buffers.empty()) {
      const Buffer& buffer = recipe.buffers[0];
      parts = make(buffer, device);
      slots[buffer.slot] = address(parts);
      if (buffer.shape[0] == 2) slots[buffer.slot + 1] = address(parts) + parts.nbytes() / 2;
    }
    const bool alone = recipe.launches.size() == 1;  // then it writes the gradients of weight and bias itself
    if (!alone) launch(recipe.launches[0], slots, device);
    for (int input : {kWeight, kBias}) {
      if (!needs(input)) continue;
      results[input] = make(vector_shape, static_cast<ScalarType>(dtypes[input]), device);
      slots[9 + input] = address(results[input]);  // 10 and 11
    }
    launch(recipe.launches[alone ? 0 : 1], slots, device);
    return results;
  }

  variable_list in_python(const Tensor& grad_y, const Tensor& grad_s, const Saved& saved) const {
    WithGil gil;
    return by_python(py::make_tuple(wrapped(grad_y), wrapped(grad_s)),
                     py::make_tuple(wrapped(saved.s), wrapped(saved.weight), wrapped(saved.mean), wrapped(saved.rstd)),
                     py::make_tuple(needs(0), needs(1), needs(2), needs(3)),
                     py::make_tuple(dtypes[0], dtypes[1], dtypes[2], dtypes[3]), numbers(shape),
                     has_vector ? py::object(numbers(vector_shape)) : py::object(py::none()), heads,
                     py::make_tuple(spec.centered, spec.eps, spec.offset, spec.parts));
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
    if (call.spec.centered) {
      std::tie(made.mean, made.rstd) = make_two(rows, call.device);
    } else {
      made.rstd = make({rows}, at::kFloat, call.device);
    }
  }
  uint64_t slots[] = {address(call.x), address(call.residual), address(call.weight), address(call.bias),
                      address(made.y), address(made.s),        address(made.mean),   address(made.rstd)};
  launch(recipe.launches[0], slots, call.device);
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
      read_impl(args[IMPL]) < 0 || x->dim() == 0 || !unwatched() || !is_current(x->device())) {
    return not_implemented();
  }
  const c10::Device device = x->device();
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

PyMethodDef methods[] = {RETROGRAD_METHODS};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "retrograd_norm_host", nullptr, -1, methods, nullptr, nullptr,
                          nullptr,               nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_retrograd_norm_host() { return PyModule_Create(&definition); }
