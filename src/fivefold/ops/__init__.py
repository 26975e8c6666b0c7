"""Tensor operations that models compute with: no model class, no layout."""
