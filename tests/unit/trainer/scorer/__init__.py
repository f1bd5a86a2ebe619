"""One training step and its optimiser steps."""
