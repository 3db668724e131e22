"""One command for whoever has GPUs: measures kernels, links and steps, and writes what was predicted beside it."""
