"""Base layer that imports no other package of fivefold: data types, arithmetic, files, text. No torch."""
