"""Prices of a layout: the hardware, as data."""
