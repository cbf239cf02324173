"""Triton kernels. Import a module of this package only where it runs: everything else works without Triton."""
