# Licensed under the Apache License, Version 2.0
"""Filters odd_hosts, unlike_pins, unlike_fleet, unlike_hosts and changed_since; documented beside."""

from __future__ import annotations

from collections import Counter


def odd_hosts(hosts, may_differ=()):
    """Sentences naming the hosts that differ from the rest of the fleet, a sentence a property.

    hosts: {host: {property: value}}. The value of most hosts counts as the fleet's; where no value has a majority every
    host is named with its own. may_differ: properties that are not compared, for all hosts or as {host: [property]}.
    """
    sentences = []
    properties = []
    for values in hosts.values():
        properties += [name for name in values if name not in properties]
    for name in properties:
        # A host of which it is not known yet is not compared, nor one that may differ in it.
        found = {
            host: values[name]
            for host, values in hosts.items()
            if name in values and name not in _allowed(may_differ, host)
        }
        counted = Counter(map(str, found.values())).most_common()
        if len(counted) < 2:
            continue
        usual, times = counted[0]
        if times * 2 > len(found):
            odd = ["%s has %s" % (host, _said(value)) for host, value in found.items() if str(value) != usual]
            sentences.append("%s: %s, the other hosts %s" % (name, ", ".join(odd), _said(usual)))
        else:
            sentences.append("%s: %s" % (name, ", ".join("%s has %s" % (host, _said(v)) for host, v in found.items())))
    return sentences


def unlike_pins(values, pins, may_differ=()):
    """Sentences on the properties of one host that differ from the pins.

    An empty pin is none, and a property that is not among `values` is not known yet.
    """
    return [
        "%s is %s, pinned is %s" % (name, _said(values[name]), pins[name]) for name in _unlike(values, pins, may_differ)
    ]


def unlike_fleet(hosts, pins, may_differ=(), failed=None):
    """Sentences naming every host that differs from its pins, then those that differ from the rest.

    hosts: {host: {property: value}}; pins: the same for what is pinned; failed: {host: what was found wrong with its
    model}. A property in which a host differs from its pin is not told once more.
    """
    failed = failed or {}
    sentences, told = [], set()
    for host, values in hosts.items():
        allowed = _allowed(may_differ, host)
        told.update(_unlike(values, pins.get(host, {}), allowed))
        unlike = unlike_pins(values, pins.get(host, {}), allowed)
        if unlike:
            sentences.append("%s is not as pinned: %s" % (host, "; ".join(unlike)))
    for host, words in failed.items():
        if "model" not in _allowed(may_differ, host):
            sentences.append("%s is not as pinned: %s" % (host, words.rstrip(". ")))
    return sentences + odd_hosts(hosts, {host: [*_allowed(may_differ, host), *told] for host in hosts})


def changed_since(now, before, may_differ=()):
    """Sentences on the properties in which one host is no longer what it was; what it may differ in is not compared."""
    return [
        "%s is %s, it was %s" % (name, _said(now[name]), _said(value))
        for name, value in before.items()
        if name in now and name not in may_differ and str(now[name]) != str(value)
    ]


def _allowed(may_differ, host):
    return may_differ.get(host, ()) if isinstance(may_differ, dict) else may_differ


def unlike_hosts(hosts, pins, may_differ=()):
    """{host: sentence} of the hosts that are to be left out so that the rest is one instrument.

    A host that differs from its pins; and of those that don't, each that differs from the value of most. Where none has
    a majority every host is named. Arguments as in unlike_fleet.
    """
    unlike = {
        host: unlike_pins(values, pins.get(host, {}), _allowed(may_differ, host)) for host, values in hosts.items()
    }
    rest = {host: hosts[host] for host, sentences in unlike.items() if not sentences}
    for name in dict.fromkeys(name for values in rest.values() for name in values):
        found = {
            host: values[name]
            for host, values in rest.items()
            if name in values and name not in _allowed(may_differ, host)
        }
        counted = Counter(map(str, found.values())).most_common()
        if len(counted) < 2:
            continue
        usual, times = counted[0]
        is_usual = times * 2 > len(found)
        for host, value in found.items():
            if not (is_usual and str(value) == usual):
                others = "most hosts have %s" % _said(usual) if is_usual else "the hosts have %d" % len(counted)
                unlike[host].append("%s is %s, %s" % (name, _said(value), others))
    return {host: "; ".join(sentences) for host, sentences in unlike.items() if sentences}


def _unlike(values, pins, may_differ):
    return [
        name
        for name, pin in pins.items()
        if pin and name in values and name not in may_differ and str(values[name]) != str(pin)
    ]


def _said(value):
    return "none" if value in (None, "", "None") else str(value)


class FilterModule:
    """Filters of this collection."""

    def filters(self):
        return {
            "odd_hosts": odd_hosts,
            "unlike_pins": unlike_pins,
            "unlike_fleet": unlike_fleet,
            "unlike_hosts": unlike_hosts,
            "changed_since": changed_since,
        }
