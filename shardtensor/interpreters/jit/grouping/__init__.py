"""Groups of equations that one kernel computes: which equations join, and the steps that run them."""
