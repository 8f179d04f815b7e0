"""The kernels themselves; nothing here is imported until a GPU tensor (or TRITON_INTERPRET=1) asks for it."""
