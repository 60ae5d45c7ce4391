"""What a run will cost: operations, memory, speed, and what finished runs teach. Used before
anything is spent; start with `estimate.py`.

    calibration.py  what finished runs teach the next estimate
    estimate.py     hours, money, memory, disk: low, likely, high
    flops.py        operations and tokens of a run from its settings
    lowering.py     which settings to lower until a run fits, or takes less time
    memory.py       memory it holds, disk it leaves
    throughput.py   seconds from operations and bytes: a table, then what was measured
"""
