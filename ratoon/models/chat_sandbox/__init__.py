"""A Jinja sandbox with limits on time, on steps and on the size of whatever a template makes.

A template is a program from a model's file or from a request, and may be hostile. Every operation whose cost is not
bounded by its own text goes through a guard, so that what runs between two looks at the clock is always short.
"""
