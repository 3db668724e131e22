"""`search`: a function and a mesh in, the function parallelised out."""
