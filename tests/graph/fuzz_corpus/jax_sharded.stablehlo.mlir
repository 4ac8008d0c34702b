module @jit_sm attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["d"=2]> {stablehlo.mesh = {axes = [{name = "d", size = 2 : i64}]}}
  func.func public @main(%arg0: tensor<32x32xf32>, %arg1: tensor<8x32xf32>) -> (tensor<32x32xf32> {jax.result_info = "result"}) {
    %0 = sdy.manual_computation(%arg0, %arg1) in_shardings=[<@mesh, [{"d"}, {}]>, <@mesh, [{}, {}]>] out_shardings=[<@mesh, [{"d"}, {}]>] manual_axes={"d"} (%arg2: tensor<16x32xf32>, %arg3: tensor<8x32xf32>) {
      %1 = "stablehlo.all_gather"(%arg2) <{all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids}> : (tensor<16x32xf32>) -> tensor<32x32xf32>
      %c = stablehlo.constant dense<0> : tensor<i32>
      %2:3 = stablehlo.while(%iterArg = %1, %iterArg_1 = %c, %iterArg_2 = %arg3) : tensor<32x32xf32>, tensor<i32>, tensor<8x32xf32>
      cond {
        %c_3 = stablehlo.constant dense<3> : tensor<i32>
        %10 = stablehlo.compare LT, %iterArg_1, %c_3, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %10 : tensor<i1>
      } do {
        %10 = func.call @closed_call(%iterArg, %iterArg_2) : (tensor<32x32xf32>, tensor<8x32xf32>) -> tensor<8x32xf32>
        %c_3 = stablehlo.constant dense<1> : tensor<i32>
        %11 = stablehlo.add %iterArg_1, %c_3 : tensor<i32>
        stablehlo.return %iterArg, %11, %10 : tensor<32x32xf32>, tensor<i32>, tensor<8x32xf32>
      }
      %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %3 = stablehlo.reduce(%2#2 init: %cst) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x32xf32>, tensor<f32>) -> tensor<f32>
      %cst_0 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %4 = stablehlo.compare GT, %3, %cst_0, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
      %5 = stablehlo.convert %4 : (tensor<i1>) -> tensor<i32>
      %6 = "stablehlo.case"(%5) ({
        %10 = stablehlo.sine %2#2 : tensor<8x32xf32>
        stablehlo.return %10 : tensor<8x32xf32>
      }, {
        %cst_1 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
        %10 = stablehlo.broadcast_in_dim %cst_1, dims = [] : (tensor<f32>) -> tensor<8x32xf32>
        %11 = stablehlo.multiply %2#2, %10 : tensor<8x32xf32>
        stablehlo.return %11 : tensor<8x32xf32>
      }) : (tensor<i32>) -> tensor<8x32xf32>
      %7 = stablehlo.transpose %6, dims = [1, 0] : (tensor<8x32xf32>) -> tensor<32x8xf32>
      %8 = stablehlo.dot_general %7, %arg3, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<32x8xf32>, tensor<8x32xf32>) -> tensor<32x32xf32>
      %9 = "stablehlo.reduce_scatter"(%8) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, scatter_dimension = 0 : i64, use_global_device_ids}> ({
      ^bb0(%arg4: tensor<f32>, %arg5: tensor<f32>):
        %10 = stablehlo.add %arg4, %arg5 : tensor<f32>
        stablehlo.return %10 : tensor<f32>
      }) : (tensor<32x32xf32>) -> tensor<16x32xf32>
      sdy.return %9 : tensor<16x32xf32>
    } : (tensor<32x32xf32>, tensor<8x32xf32>) -> tensor<32x32xf32>
    return %0 : tensor<32x32xf32>
  }
  func.func private @closed_call(%arg0: tensor<32x32xf32>, %arg1: tensor<8x32xf32>) -> tensor<8x32xf32> {
    %0 = stablehlo.dot_general %arg1, %arg0, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x32xf32>, tensor<32x32xf32>) -> tensor<8x32xf32>
    %1 = stablehlo.tanh %0 : tensor<8x32xf32>
    return %1 : tensor<8x32xf32>
  }
}
