"""Host code that holds no kernel, written once for all languages: it takes a language's kernels as arguments.

Kernel files import it. `liger_core` itself doesn't.
"""
