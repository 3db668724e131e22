"""A plan for people: as text, and as a page with a picture."""
