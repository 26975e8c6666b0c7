"""What models compute with, on tensors alone: no model class, no layout."""
