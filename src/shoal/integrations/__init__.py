"""Shoal inside the training loops of other libraries; each file needs the library it is named after."""
