synthetic = None
