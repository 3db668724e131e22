"""Divisions of models into stages and parts beside published ones, and predicted beside measured step times."""
