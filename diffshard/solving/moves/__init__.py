"""Moves that improve choices: forests, neighbourhoods, single nodes of many choices at once, and tied layers."""
