"""Which device holds which rows and columns of embedding tables; `space.py` has the space, `base.py` its words."""
