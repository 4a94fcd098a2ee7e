# Licensed under the Apache License, Version 2.0
"""Filters odd_hosts and unlike_pins; documented beside."""

from __future__ import annotations

from collections import Counter


def odd_hosts(hosts, may_differ=()):
    """Sentences naming the hosts that differ from the rest of the fleet, a sentence a property.

    hosts: {host: {property: value}}. The value of most hosts counts as the fleet's; where no value has a majority every
    host is named with its own.
    """
    sentences = []
    properties = []
    for values in hosts.values():
        properties += [name for name in values if name not in properties]
    for name in properties:
        if name in may_differ:
            continue
        found = {host: values.get(name) for host, values in hosts.items()}
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
    """Sentences on the properties of one host that differ from the pins; an empty pin is none."""
    return [
        "%s is %s, pinned is %s" % (name, _said(values.get(name)), pin)
        for name, pin in pins.items()
        if pin and name not in may_differ and str(values.get(name)) != str(pin)
    ]


def _said(value):
    return "none" if value in (None, "", "None") else str(value)


class FilterModule:
    """Filters of this collection."""

    def filters(self):
        return {"odd_hosts": odd_hosts, "unlike_pins": unlike_pins}
