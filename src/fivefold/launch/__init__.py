"""Starting worker processes, or finding the ones that something else has started."""
