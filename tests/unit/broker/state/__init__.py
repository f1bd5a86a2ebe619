"""Operations on a run's state: from submission to acknowledgement, and every way out."""
