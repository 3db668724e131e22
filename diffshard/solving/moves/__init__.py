"""Changes of a choice: of single nodes, of forests, of neighbourhoods, at random, and of equal layers at once."""
