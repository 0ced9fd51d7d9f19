"""A stand-in for a CUDA device: PyTorch's caching allocator as a model, and the functions of `torch.cuda`."""
