"""The scheduler: the programs of maps on few threads, which are suspended while they wait for each other.

The main nouns are `Program` and `Rendezvous` (`mapped_program`: the state in which a call runs or waits), `Scheduler`
(`scheduler`: runs programs and detects deadlocks) and the worker (`workers`: a greenlet that stays for the next
program). `collective_errors` describes deadlocks and calls that differ, `device_context` sets the current device of a
program, `assistant` calls a function in another thread for it. `helper_delays` decides when helper threads are woken,
and `breakpoints` whether a debugger has stopped a program.

A map enters by `scheduler.run`. Operators and interpreters must not be imported here: the scheduler knows calls only.
"""
