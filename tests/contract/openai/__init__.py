"""The OpenAI-compatible endpoint, called by the real `openai` client."""
