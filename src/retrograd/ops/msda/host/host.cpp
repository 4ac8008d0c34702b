// Eager deformable attention: its arguments, autograd node and results. What is launched is told by recipes.py after
// Python has run a call for which there was no recipe; such a call gets the bytes of its key.

#include "host.hpp"

#include <ATen/Context.h>

namespace {

// The numbers of slots.py.
enum Slot { VALUE, SHAPES, REFERENCES, LOCATIONS, WEIGHTS, GRAD_OUT, OUT, GRAD_VALUE, GRAD_LOCATIONS, GRAD_WEIGHTS,
            OFFSETS = 17, LOGITS, GRAD_OFFSETS, GRAD_LOGITS, GRAD_REFERENCES, SLOTS };

constexpr size_t kMostLevels = 16;

// What is computed, beside the tensors.
struct Attention {
  c10::Device device{c10::kCPU};
  Shape sizes;   // height and width of each level; none where they are in a tensor
  Shape points;  // of each level
  bool border = false, aligned = false, deterministic = false;
  int impl = 0;
};

// Inputs in the order of the node's; those that are not there are undefined.
struct Inputs {
  Tensor value, locations, weights, references, shapes;

  std::array<const Tensor*, 5> all() const { return {&value, &locations, &weights, &references, &shapes}; }
};

bool is_float(ScalarType dtype) { return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16; }

// All that the launches depend on; false where the tensors are not as kernels read them.
bool add_call(Key& key, const Attention& attention, const Inputs& inputs) {
  uint64_t all = 0;
  for (const Tensor* t : inputs.all()) {
    if (t->defined() && (!plain(*t, attention.device, all) || !t->is_contiguous())) return false;
  }
  if (all % 16 != 0) return false;
  key.add(attention.device.index());
  for (int64_t size : inputs.value.sizes()) key.add(size);
  key.add(inputs.locations.size(1));
  for (const Tensor* t : inputs.all()) key.add(t->defined() ? static_cast<int64_t>(t->scalar_type()) : -1);
  key.add(inputs.references.defined() ? inputs.references.size(3) : 0);
  key.add(static_cast<int64_t>(attention.points.size()));
  for (int64_t count : attention.points) key.add(count);
  for (int64_t size : attention.sizes) key.add(size);
  key.add(attention.border | attention.aligned << 1 | attention.deterministic << 2);
  key.add(attention.impl);
  return true;
}

void put_addresses(uint64_t* slots, const Inputs& inputs) {
  slots[VALUE] = address(inputs.value);
  slots[SHAPES] = address(inputs.shapes);
  slots[REFERENCES] = address(inputs.references);
  slots[LOCATIONS] = address(inputs.locations);
  slots[WEIGHTS] = address(inputs.weights);
}

// ---- The node ------------------------------------------------------------------------------------------------------

struct MsdaBackward final : Node {
  Attention attention;
  Shape out_shape;
  std::array<SavedVariable, 5> kept;

  std::string name() const override { return "MsdaFunctionBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& each : kept) each.reset_data();
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    throw std::runtime_error(
        "compiled autograd cannot trace the C++ path of retrograd's deformable attention; set RETROGRAD_HOST=off "
        "before the forward");
  }

  variable_list apply(variable_list&& grads) override {
    const Inputs inputs = unpack();
    // The one result has a gradient, or else one of zeros.
    const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros(out_shape, inputs.value.options());
    Key key;
    // create_graph=True: the gradients come from operations that can be differentiated.
    const bool known = !torch::autograd::GradMode::is_enabled() && add_backward(key, grad_out, inputs);
    if (known) {
      if (const auto recipe = state().backward.find(key)) return launched(*recipe, grad_out, inputs);
    }
    return in_python(grad_out, inputs, known ? &key : nullptr);
  }

 private:
  bool needs(int input) const { return should_compute_output(input); }

  Inputs unpack() {
    std::lock_guard<std::mutex> lock(mutex_);
    const NodePtr self = getptr();
    return {kept[0].unpack(self), kept[1].unpack(self), kept[2].unpack(self), kept[3].unpack(self),
            kept[4].unpack(self)};
  }

  bool add_backward(Key& key, const Tensor& grad_out, const Inputs& inputs) const {
    uint64_t all = 0;
    // Hooks may have unpacked something else than was packed.
    for (const Tensor* t : {&inputs.value, &inputs.locations, &inputs.weights}) {
      if (!t->defined()) return false;
    }
    if (!unwatched() || !plain(grad_out, attention.device, all) || all % 16 != 0 ||
        !grad_out.is_contiguous() || grad_out.sizes() != at::IntArrayRef(out_shape) ||
        grad_out.scalar_type() != inputs.value.scalar_type() || !add_call(key, attention, inputs)) {
      return false;
    }
    key.add(needs(0) | needs(1) << 1 | needs(2) << 2 | needs(3) << 3);
    return true;
  }

  variable_list launched(const Recipe& recipe, const Tensor& grad_out, const Inputs& inputs) const {
    c10::OptionalDeviceGuard guard(attention.device);
    std::array<Tensor, SLOTS> held;
    uint64_t slots[SLOTS] = {};
    put_addresses(slots, inputs);
    slots[GRAD_OUT] = address(grad_out);
    // The fused form's inputs; locations and weights that are made of them are buffers.
    const bool is_fused = inputs.references.defined();
    if (is_fused) {
      slots[OFFSETS] = slots[LOCATIONS];
      slots[LOGITS] = slots[WEIGHTS];
    }
    const int of_locations = is_fused ? GRAD_OFFSETS : GRAD_LOCATIONS, of_weights = is_fused ? GRAD_LOGITS : GRAD_WEIGHTS;
    auto like = [&](const Tensor& t) { return make(t.sizes(), t.scalar_type(), attention.device); };
    if (needs(1)) held[of_locations] = like(inputs.locations);
    if (needs(2)) held[of_weights] = like(inputs.weights);
    if (needs(3)) held[GRAD_REFERENCES] = like(inputs.references);
    for (const Buffer& buffer : recipe.buffers) held[buffer.slot] = make(buffer, attention.device);
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (held[slot].defined()) slots[slot] = address(held[slot]);
    }
    for (const Launch& each : recipe.launches) launch(each, slots, attention.device);
    Tensor& grad_value = held[GRAD_VALUE];
    if (grad_value.defined()) grad_value = grad_value.to(inputs.value.scalar_type());
    return {grad_value, held[of_locations], held[of_weights], held[GRAD_REFERENCES]};
  }

  variable_list in_python(const Tensor& grad_out, const Inputs& inputs, const Key* key) const {
    WithGil gil;
    py::tuple saved(5);
    for (size_t i = 0; i < 5; ++i) saved[i] = wrapped(*inputs.all()[i]);
    return by_python(wrapped(grad_out), saved, numbers(attention.sizes), numbers(attention.points),
                     py::make_tuple(attention.border, attention.aligned, attention.deterministic), attention.impl,
                     py::make_tuple(needs(0), needs(1), needs(2), needs(3)),
                     key != nullptr ? py::object(py::bytes(std::string(key->bytes()))) : py::object(py::none()));
  }
};

// ---- The arguments -------------------------------------------------------------------------------------------------

// A list or tuple of whole numbers, behind those that are there.
bool read_sizes(PyObject* given, Shape& sizes) {
  if (!PyList_CheckExact(given) && !PyTuple_CheckExact(given)) return false;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(given);
  if (count + sizes.size() > 2 * kMostLevels) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* size = PySequence_Fast_GET_ITEM(given, i);
    if (!PyLong_CheckExact(size)) return false;
    sizes.push_back(PyLong_AsLongLong(size));
    if (sizes.back() < 0) {
      PyErr_Clear();  // of one that has no room
      return false;
    }
  }
  return true;
}

// (height, width) of each level, into `sizes` from a list or a tensor on the host, else into `shapes`.
bool read_levels(PyObject* given, const Tensor& value, Shape& sizes, Tensor& shapes) {
  if (PyList_CheckExact(given) || PyTuple_CheckExact(given)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(given); ++i) {
      if (!read_sizes(PySequence_Fast_GET_ITEM(given, i), sizes) || sizes.size() != 2 * (i + 1ul)) return false;
    }
  } else {
    if (!THPVariable_CheckExact(given)) return false;
    const Tensor& tensor = THPVariable_Unpack(given);
    const bool wide = tensor.scalar_type() == at::kLong;
    if (tensor.dim() != 2 || tensor.size(1) != 2 || !(wide || tensor.scalar_type() == at::kInt)) return false;
    if (!tensor.is_cpu()) {
      shapes = tensor;  // `add_call` looks at the rest
      return tensor.size(0) <= static_cast<int64_t>(kMostLevels);
    }
    if (!tensor.is_contiguous() || (tensor.key_set().raw_repr() & ~keys_of(c10::kCPU)) != 0 ||
        tensor.numel() > static_cast<int64_t>(2 * kMostLevels)) {
      return false;
    }
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      sizes.push_back(wide ? tensor.const_data_ptr<int64_t>()[i] : tensor.const_data_ptr<int32_t>()[i]);
      if (sizes.back() < 0) return false;
    }
  }
  int64_t pixels = 0;
  for (size_t i = 0; i + 1 < sizes.size(); i += 2) {
    int64_t level;
    if (__builtin_mul_overflow(sizes[i], sizes[i + 1], &level) || __builtin_add_overflow(pixels, level, &pixels)) {
      return false;
    }
  }
  return pixels == value.size(1);
}

bool read_points(PyObject* given, const Inputs& inputs, int64_t levels, Shape& points) {
  if (given != Py_None) return read_sizes(given, points) && static_cast<int64_t>(points.size()) == levels;
  if (inputs.locations.dim() != 6) return false;
  points.assign(levels, inputs.locations.size(4));
  return true;
}

bool read_deterministic(PyObject* given, bool& deterministic) {
  const bool required = at::globalContext().deterministicAlgorithms();
  deterministic = given == Py_True || (given == Py_None && required);
  return given == Py_True || given == Py_None || (given == Py_False && !required);
}

// Whether dtypes and shapes are those that validation.py asks for.
bool fits(const Inputs& inputs, const Shape& points, bool per_level) {
  const Tensor &value = inputs.value, &locations = inputs.locations, &weights = inputs.weights;
  if (!is_float(value.scalar_type())) return false;
  for (const Tensor* t : {&locations, &weights, &inputs.references}) {
    if (t->defined() && t->scalar_type() != value.scalar_type() && t->scalar_type() != at::kFloat) return false;
  }
  const int64_t levels = static_cast<int64_t>(points.size()), queries = locations.dim() > 1 ? locations.size(1) : 0;
  int64_t all = 0;
  for (int64_t count : points) all += count;
  Shape places = {value.size(0), queries, value.size(2)};
  const Shape row = {value.size(0), queries, value.size(2), all};
  if (per_level) {
    places.push_back(all);
  } else {
    places.push_back(levels);
    places.push_back(levels ? points[0] : 0);
  }
  const bool is_fused = inputs.references.defined();
  if (weights.sizes() != at::IntArrayRef(is_fused ? row : places)) return false;
  places.push_back(2);
  if (locations.sizes() != at::IntArrayRef(places)) return false;
  if (!is_fused) return true;
  const Tensor& references = inputs.references;
  return references.dim() == 4 && references.size(0) == value.size(0) && references.size(1) == queries &&
         references.size(2) == levels && (references.size(3) == 2 || references.size(3) == 4);
}

bool read_padding(PyObject* given, bool& border) {
  if (!PyUnicode_CheckExact(given)) return false;
  border = PyUnicode_CompareWithASCIIString(given, "border") == 0;
  return border || PyUnicode_CompareWithASCIIString(given, "zeros") == 0;
}

enum Argument { A_VALUE, A_LEVELS, A_LOCATIONS, A_WEIGHTS, A_REFERENCES, A_PADDING, A_ALIGNED, A_POINTS,
                A_DETERMINISTIC, A_IMPL, ARGUMENTS };

Tensor forward(const Attention& attention, const Inputs& inputs, const Recipe& recipe) {
  RECORD_FUNCTION("MsdaFunction", c10::ArrayRef<const c10::IValue>{}, at::sequence_number::peek());
  const Tensor& value = inputs.value;
  Tensor out = make({value.size(0), inputs.locations.size(1), value.size(2), value.size(3)}, value.scalar_type(),
                    attention.device);
  uint64_t slots[SLOTS] = {};
  put_addresses(slots, inputs);
  slots[OUT] = address(out);
  for (const Launch& each : recipe.launches) launch(each, slots, attention.device);
  return out;
}

void connect(const Attention& attention, const Inputs& inputs, Tensor& out) {
  auto node = make_node<MsdaBackward>();
  node->set_next_edges(
      torch::autograd::collect_next_edges(inputs.value, inputs.locations, inputs.weights, inputs.references));
  node->attention = attention;
  node->out_shape.assign(out.sizes().begin(), out.sizes().end());
  torch::autograd::set_history(out, NodePtr(node));
  for (size_t i = 0; i < node->kept.size(); ++i) {
    if (inputs.all()[i]->defined()) node->kept[i] = SavedVariable(*inputs.all()[i], false);
  }
}

// The output; the bytes of a key where Python has to say what is launched; NotImplemented where it has to do it.
PyObject* apply(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == ARGUMENTS, "apply takes ", static_cast<int>(ARGUMENTS), " arguments, got ", count);
  const Tensor *value, *locations, *weights, *references;
  if (args[A_VALUE] == Py_None || args[A_LOCATIONS] == Py_None || args[A_WEIGHTS] == Py_None ||
      !read_tensor(args[A_VALUE], value) || !read_tensor(args[A_LOCATIONS], locations) ||
      !read_tensor(args[A_WEIGHTS], weights) || !read_tensor(args[A_REFERENCES], references)) {
    return not_implemented();
  }
  Inputs inputs{*value, *locations, *weights, *references, {}};
  Attention attention;
  attention.device = value->device();
  attention.impl = read_impl(args[A_IMPL]);
  attention.aligned = args[A_ALIGNED] == Py_True;
  if (attention.impl < 0 || value->dim() != 4 || !PyBool_Check(args[A_ALIGNED]) ||
      !read_padding(args[A_PADDING], attention.border) ||
      !read_deterministic(args[A_DETERMINISTIC], attention.deterministic) || !unwatched() ||
      !is_current(attention.device) || !read_levels(args[A_LEVELS], *value, attention.sizes, inputs.shapes)) {
    return not_implemented();
  }
  const int64_t levels =
      inputs.shapes.defined() ? inputs.shapes.size(0) : static_cast<int64_t>(attention.sizes.size() / 2);
  Key key;
  if (!read_points(args[A_POINTS], inputs, levels, attention.points) ||
      !fits(inputs, attention.points, args[A_POINTS] != Py_None) || !add_call(key, attention, inputs) || hooked()) {
    return not_implemented();
  }
  const auto recipe = state().forward.find(key);
  if (recipe == nullptr) {
    const auto bytes = key.bytes();
    return PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
  }
  const bool recorded = torch::autograd::GradMode::is_enabled() &&
                        (value->requires_grad() || locations->requires_grad() || weights->requires_grad() ||
                         (references->defined() && references->requires_grad()));
  Tensor out;
  {
    WithoutGil released;
    out = forward(attention, inputs, *recipe);
    if (recorded) connect(attention, inputs, out);
  }
  return THPVariable_Wrap(std::move(out));
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {RETROGRAD_METHODS};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "retrograd_msda_host", nullptr, -1, methods, nullptr, nullptr,
                          nullptr,               nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_retrograd_msda_host() { return PyModule_Create(&definition); }
