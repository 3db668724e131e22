"""Faults that are planted into a copy of the code, to see whether the tests notice them."""
