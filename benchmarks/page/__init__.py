"""What the live page costs: in Chromium over a large recording, and for a run that many look at."""
