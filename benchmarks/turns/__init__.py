"""Measures learning over several turns: credit by turns next to credit by samples."""
