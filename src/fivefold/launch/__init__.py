"""Starting worker processes, or finding those that another launcher has started."""
