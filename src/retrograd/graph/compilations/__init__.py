"""Compilations of a recorded run of torch.compile, from the logs that TORCH_TRACE wrote, of one rank or many."""
