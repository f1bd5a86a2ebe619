"""What is an address in object storage, and what a name below it may be."""

import pytest

from penstock.storage.addresses import below, checked_address, is_below


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://models/qwen/7b/", "s3://models/qwen/7b"),
        ("s3://models", "s3://models"),
        ("gs://my.bucket/rows 1.jsonl", "gs://my.bucket/rows 1.jsonl"),
        ("file:///srv/model", "file:///srv/model"),
    ],
)
def test_addresses_end_without_a_slash(text, expected):
    assert checked_address(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memory://models/a", "none of the known kinds"),
        ("https://host/model", "none of the known kinds"),
        ("s3://", "must begin with a bucket"),
        ("s3://key:secret@bucket/a", "without a password"),
        ("s3://bucket/../other", "cannot be the name of an object"),
        ("s3://bucket/a//b", "cannot be the name of an object"),
        ("s3://bucket/a?versionId=1", "cannot be the name of an object"),
        ("s3://bucket/*.jsonl", "cannot be the name of an object"),
        ("s3://bucket/a\nb", "cannot be the name of an object"),
        ("file://host/srv/model", "from the root"),
        ("file:///srv/../etc", "cannot be the name of an object"),
    ],
)
def test_others_are_refused_by_what_they_must_be(text, expected):
    with pytest.raises(ValueError, match=expected):
        checked_address(text)


def test_what_is_below_an_address_does_not_only_begin_like_it():
    folder = checked_address("s3://bucket/runs")
    assert is_below(below(folder, "a/b"), folder)
    assert is_below(folder, folder)
    assert not is_below(checked_address("s3://bucket/runs-of-others/a"), folder)
    with pytest.raises(ValueError, match="cannot be the name"):
        below(folder, "../models")
