"""Moves arrays between plans and meshes, and says what that takes."""
