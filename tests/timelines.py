"""Traces as they were written, of which the form is checked."""

import json
from collections import Counter as Counts


class Timeline:
    """A trace as it was written, of which the form was checked."""

    def __init__(self, written):
        whole = json.loads(written if isinstance(written, str) else written.read_text())
        assert set(whole) == {"traceEvents", "otherData", "displayTimeUnit"}
        self.overwritten = whole["otherData"]["overwritten"]
        self.spans, self.moments, self.names = {}, [], {}
        for event in whole["traceEvents"]:
            assert isinstance(event["name"], str)
            assert all(type(event[key]) is int for key in ("pid", "tid"))
            track = event["pid"], event["tid"]
            if event["ph"] == "M":
                assert event["name"] in ("process_name", "thread_name", "process_sort_index")
                if event["name"] == "thread_name":
                    self.names[track] = event["args"]["name"]
                continue
            assert event["ts"] >= 0
            if event["ph"] == "i":
                assert event["s"] in ("g", "t")
                self.moments.append(event)
                continue
            assert event["ph"] == "X" and event["dur"] >= 0 and isinstance(event["cat"], str)
            self.spans.setdefault(track, []).append(event)
        assert set(self.spans) <= set(self.names)
        for spans in self.spans.values():
            check_order(spans)

    def tracks(self, name):
        """The spans of the tracks of this name, one list each."""
        return [
            self.spans.get(track, []) for track, of in self.names.items() if of.startswith(name)
        ]

    @property
    def parent(self):
        (spans,) = self.tracks("parent")
        return spans

    def workers(self):
        return [span for spans in self.tracks("worker") for span in spans]

    def counts(self, spans=None):
        """How many steps and resets of each env there are."""
        spans = self.workers() if spans is None else spans
        return Counts(span["name"] for span in spans if span["cat"] in ("step", "reset"))


def ns(span):
    """When it begins and ends; as integers, as decimals do not add up."""
    begin = round(1000 * span["ts"])
    return begin, begin + round(1000 * span["dur"])


def check_order(spans):
    """Spans begin one after the other, and each lies behind the one before it or within it."""
    last, within = 0, 0
    for span in spans:
        begin, end = ns(span)
        assert begin <= end
        if begin >= within:
            last = begin
            within = end
        else:
            assert last <= begin and end <= within, "two spans overlap"
            assert span["cat"] == "reset"
            last = end
