"""OpenAI's formats: requests, errors, chat templates and tool calls.

Pure translation, field by field. No session and no engine.
"""
