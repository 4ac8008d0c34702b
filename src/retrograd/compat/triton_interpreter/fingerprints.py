"""Fingerprints of the functions of Triton's interpreter that are replaced, on versions that the self-test ran on."""

# Of Triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0: all of these files together, and function by function.
FILES = ("runtime/interpreter.py", "language/core.py", "language/semantic.py")
KNOWN_FILES = ("e51937ee774362a0", "1df8b5e1ca8ada57", "f9fff16a8b102dd3", "c9fcc1fd1f2922d2")
KNOWN = {
    "FunctionRewriter._get_jit_fn_file_line": "52b45e8e e0d92fc9",
    "FunctionRewriter._transform_ast": "c948f753",
    "GridExecutor.__call__": "a8a9450a e52d3746",
    "GridExecutor.__init__": "0db58ba7 22540fe9",
    "InterpreterBuilder.binary_op": "df11eb49 ca085f65",
    "InterpreterBuilder.cast_impl": "b221bbb7",
    "InterpreterBuilder.create_atomic_cas": "b7c0e3f0",
    "InterpreterBuilder.create_atomic_rmw": "439de214",
    "InterpreterBuilder.create_clampf": "6da30573 adf56082",
    "InterpreterBuilder.create_dot": "7d5da68c",
    "InterpreterBuilder.create_fma": "23c2e952 3ad626bc",
    "InterpreterBuilder.create_masked_load": "3d7f09b9 b80d0b66",
    "InterpreterBuilder.create_masked_store": "c749a5da 1d5e501b",
    "InterpreterBuilder.create_maxnumf": "cdffffd7 40abc28e",
    "InterpreterBuilder.create_minnumf": "325991e6 8dd49858",
    "InterpreterBuilder.create_print": "b6543783 239d8d2a",
    "InterpreterBuilder.unary_op": "fae9670a",
    "ReduceOps.apply_impl": "d5499eac 964ac461",
    "ScanOps.apply_impl": "0f641466 4ec9efaf",
    "TritonSemantic.binary_op_sanitize_overflow_impl": "1ad65a10 bdd7f3e2",
    "TritonSemantic.broadcast_impl_value": "9b794913 42170987 90c3a175",
    "TritonSemantic.cast": "193ece28 b69dba33",
    "block_type.__init__": "403f4b01",
    "interpreter._convert_float": "b466f779 65dc886a",
    "interpreter._get_np_dtype": "8f20d41e",
    "interpreter._implicit_cvt": "d1b53b29 e5826185 b2bbf80d a1cebff7",
    "interpreter._mxfp_value_handle_to_float32": "ab8c007d",
    "interpreter._patch_attr": "935587c8 e0c1b7d6",
    "interpreter._patch_builtin": "3c21c270",
    "interpreter._patch_lang": "e5beeba7",
    "interpreter._patch_lang_tensor": "efc91e4a 1475c3a0 7c7aba52",
    "tensor.__init__": "d9b043b5",
}
