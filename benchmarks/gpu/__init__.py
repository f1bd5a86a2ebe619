"""`make gpu-check`: runs every test that needs an NVIDIA GPU, and writes one page with their results and figures."""
