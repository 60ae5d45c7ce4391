"""The thresholds of all detectors of `diagnose` and of alerts, each with its reason.

Start values came from a survey of failed runs; they were then settled on synthetic runs of seeds
that no test uses, and on real runs of the built-in model (tests/evidence).
"""

from envs.audit import verdict as audit_verdict

# --- windows --------------------------------------------------------------------------------

# Ten steps of usual size (16 tasks, 8 answers) are 1,280 answers: a share is known to a point or
# two, and no run has spent much by then.
RECENT_STEPS = 10
# With fewer steps than this a mean is noise. Five are enough to tell before `no_signal` ends a run
# at ten.
FEWEST_STEPS = 5
# A trend is the last third of the steps against the first; below this many steps, thirds are noise.
FEWEST_TREND_STEPS = 18
# The thirds must differ by this many standard errors to count as a trend: at 3 a flat curve passes
# for a trend in one of several hundred tests, and a run is tested after every step.
TREND_Z = 3.0
# Evidence that a curve rises only excuses a run, so it need not be as strong as what accuses one.
RISING_Z = 2.0
# If a share of bad answers fell to this part of its start, the training is mending it by itself...
IMPROVED_PART = 0.6
# ...unless the share is still above this: such a run needs the advice all the same.
URGENT_SHARE = 0.3
# A share of solved answers that rose this much (and by `TREND_Z`) is learning.
LEARNING_GAIN = 0.1

# --- groups ---------------------------------------------------------------------------------

# Below this share of groups with a gradient a step is a random walk: under five groups of 16.
LOW_EFFECTIVE_SHARE = 0.3
# Below this share GRPO has next to nothing to select; the learnability probe says the same.
TINY_EFFECTIVE_SHARE = 0.2
# Groups with equal rewards because all answers are right are what a run is for. Only groups with
# equal rewards and wrong answers count as a trouble, from this share of all groups on.
HIGH_UNSOLVED_SHARE = 0.4
# Different answers of a group, as a share of its size: below it the answers are one and the same.
LOW_DISTINCT_SHARE = 0.25
# Shares of solved answers that count as hardly ever, and as nearly always.
HARDLY_SOLVED_SHARE = 0.05
NEARLY_ALL_SOLVED_SHARE = 0.95
# If this share of held-out tasks was ever solved, at the start or later, they are not "too hard":
# twice what a model that cannot solve them gets by luck, and more than the noise of twenty tasks.
FAIRLY_SOLVED_SHARE = 0.15
# Share of answers that earn one and the same reward: above it groups are on a plateau.
HIGH_PLATEAU_SHARE = 0.6
# Share of groups whose every answer is right: above the first nothing is left to learn from; above
# the second if the exam (the held-out tasks) is solved too.
ALL_SOLVED_SHARE = 0.95
MOSTLY_SOLVED_SHARE = 0.75
# Steps in that state before it is reported: a shorter spell ends by itself.
FEWEST_SOLVED_STEPS = 15
# Training tasks are all solved, held-out tasks this much less: the exam is behind.
HELDOUT_GAP = 0.15
# Groups of the first size miss differences that groups of the second, usual size show.
SMALL_GROUP_SIZE, USUAL_GROUP_SIZE = 4, 8
# Entropy at this part of its start leaves one or two words to choose from at a token.
ENTROPY_LEFT_PART = 0.3
# A start below this (nats per token) is not exploration that could be lost.
LEAST_START_ENTROPY = 0.05
# Steps after the fall before "and nothing came of it" can be concluded.
ENTROPY_FLAT_STEPS = 10
# Entropy lost within this many first steps: a step that takes exploration at once was too large.
ENTROPY_EARLY_STEPS = 5
# A run that went this part of the way to solving everything lost its entropy to learning.
PART_OF_WAY = 0.5

# --- answers --------------------------------------------------------------------------------

# One answer in ten cut by a limit: the mean reward no longer measures what is meant.
HIGH_CUT_SHARE = 0.1
# A cut answer that earns this part of the mean is paid like any other: length costs it nothing...
CUT_REWARD_PART = 0.9
# ...if it also earns at least this part of what the start earned: if all answers are cut and none
# is paid, cut answers earn the mean too.
LEAST_PART_OF_START_REWARD = 0.2
# Reference answers within this part of `max_tokens` fit easily: a higher limit would not help.
EASY_FIT_PART = 0.5
# Advised `max_tokens`, in lengths of a reference answer: the settings' own default is twice.
ROOM_FACTOR = 2
# Fewest held-out answers for a finding about a share of them (a tenth of 20 is two).
FEWEST_ANSWERS = 20
# Part of `max_tokens` that the median think block takes; above it, a further rise cuts answers.
HIGH_THINK_PART = 0.7
# Think blocks in fewer answers than this are an accident.
LEAST_THINKING_SHARE = 0.3
# Repeated four-grams: twice what the base does, and a quarter of the text, which prose does not
# reach (prose of the built-in and of common chat models stays below a tenth).
REPEATED_GROWTH = 2.0
HIGH_REPEATED_SHARE = 0.25
# A base that repeats half of its text does so without any training.
HEAVY_REPEATED_SHARE = 0.5
# Share of answers the scorer could not parse. At one in ten the reward is about form, not the task.
HIGH_UNPARSED_SHARE = 0.1
# Wrapped answers (in a code fence or a phrase) that earn at most this part of what bare ones earn.
WRAPPED_REWARD_PART = 0.5
# Below this share of parsed answers no reward teaches the form: it must be shown in the prompt.
HARDLY_PARSED_SHARE = 0.3

# --- rewards --------------------------------------------------------------------------------

# Failed scores: above it no verdict is given either (stats.MAX_ERROR_SHARE).
HIGH_ERROR_SHARE = 0.05
# Share of answers that another env process scores differently: what the audit tolerates...
TOLERATED_SHARE = audit_verdict.UNSTABLE
# ...but at least this many answers: one alone may be random, such as a program that draws numbers.
FEWEST_DIFFERING = 2
# The tolerated share if a network is allowed, as a judge outside may have changed its mind: a
# quarter of 24 are six; two fresh processes agree on more by chance in under one of 100 cases.
TOLERATED_SHARE_WITH_NETWORK = 0.25
# Scoring is slow if it takes more than this share of the step, and at least this many seconds.
SLOW_PART_OF_STEP = 0.5
SLOW_SECONDS = 1.0
# From the first value (0 to 1) on a judge counts as pleased; up to the second a check failed.
HIGH_JUDGE_SCORE = 0.7
LOW_CHECK_SCORE = 0.3
# Share of answers with a pleased judge and a failed check. Judges that agree with people still err
# on about a tenth.
HIGH_JUDGE_GAP = 0.15
# Signals of an exploit: answers half as long again or a third shorter...
LONGER_FACTOR, SHORTER_FACTOR = 1.5, 0.67
# ...this share of answers with the same text for different tasks, risen by this much. If success
# followed the reward, or is unknown, the share must be higher: two equally likely labels give 0.5.
HIGH_ALIKE_SHARE, ALIKE_RISE = 0.4, 0.3
HIGHER_ALIKE_SHARE = 0.7
# ...a reward for form that is paid in full, risen by this much, while no more tasks are solved.
FULL_FORM_SCORE, FORM_RISE = 0.9, 0.2
# Success did not follow the reward if it moved less than the first number, or less than the second
# as a part of the reward's movement (measured in parts of the highest reward).
SMALL_SUCCESS_CHANGE = 0.05
PART_OF_REWARD_RISE = 0.3
# A reward that lost less than this part of what success lost did not punish the fall of success.
PART_OF_SUCCESS_LOSS = 0.5
# A reward fell if it lost this part of its start, and this many standard errors: a run is tested
# after every step, and an alert needs two such steps in a row.
LOST_REWARD_PART = 0.25
FALL_Z = 2.5
# How many steps at the beginning of a run, and at its end, are averaged to see a fall.
FALL_FIRST_STEPS, FALL_LAST_STEPS = 2, 3
# Wrong answers that came to earn this part of what right ones earn (the reward audit calls the same
# a risk); and the part of the reward's rise that is not due to more right answers.
WRONG_REWARD_PART = 0.5
UNEARNED_PART = 0.5
# Signals needed for the finding. One alone has innocent reasons: answers get shorter, for example.
FEWEST_HACKING_SIGNALS = 2

# --- learning -------------------------------------------------------------------------------

# Overfitting: held-out loss rose in this many evaluations in a row, to this share above its lowest.
# Three rises in a row come by chance in one of eight cases; half a percent is rounding.
FEWEST_EVALUATIONS = 3
OVERFIT_RISE_PART = 0.02
# ...unless held-out success rose by this much since then, and beyond its noise: success decides.
OVERFIT_SUCCESS_GAIN = 0.03
# From this many passes over the rows on, a run learns them by heart.
MANY_PASSES = 10
# Nothing is solved yet, but the held-out loss fell by this part in the second half of its
# evaluations: train longer, as right answers come after the loss. A loss at rest moves by less.
STILL_FALLING_PART = 0.1
# Rows are known by heart if their loss is this part of the held-out loss, after this many passes. A
# run that learns the rule has about the same loss on both, even after many passes.
MEMORISED_LOSS_PART = 0.2
SEVERAL_PASSES = 4
# If more of the held-out tasks are solved than this, the rows taught what they are for.
MEMORISED_SOLVED_SHARE = 0.6
# Advised number of rows, in those there are: one run of 23 % came to 89 % with ten times as many.
MORE_ROWS_FACTOR = 10
# Nothing is solved, and the held-out loss fell all the time but by less than this part of its
# start: the steps are too small. At a usual learning rate the first dozen steps do more.
SLOW_FALL_PART = 0.2
# AdamW moves a weight by at most about the learning rate per step, so the sum of the rates bounds
# how far any weight moved. Up to 1e-4 an adapter answers as before.
LEAST_WEIGHT_MOVE = 1e-4
# A gradient norm below this counts as 0.
ZERO_GRADIENT_NORM = 1e-8
# A gradient norm is a spike at this many times the median of the steps before it (the second number
# is how many steps), if it is also above the clip.
SPIKE_FACTOR = 10.0
SPIKE_MEMORY_STEPS = 20
# A training loss of this many times its first value, and this many nats above it, is not the noise
# of batches: the model is destroyed.
EXPLODED_FACTOR, EXPLODED_RISE = 3.0, 2.0
# How many steps that must last. In SFT at the default rate the loss of a new form soars within the
# warm-up and is below its first value after 10 to 20 steps; such a run ends well.
EXPLODED_STEPS = 20
# One spike that clipping catches is harmless; this many, or one with a fall after it, are not.
FEWEST_SPIKES = 3
# KL divergence per token (nats) below which a jump does not count.
KL_FLOOR = 0.1

# --- rows ---

# Share of training rows that contradict another row: one in ten, as for rows that are cut.
HIGH_CONTRADICTED_SHARE = 0.1
# Share of DPO pairs whose better answer the policy came to prefer: it has learnt from them.
LEARNT_PAIRS_SHARE = 0.7
# Share of training rows that are copies of others: half is no accident of a few common questions.
HIGH_COPIED_SHARE = 0.5
# Share of DPO pairs whose two answers are alike: half leaves too little to learn from.
HIGH_ALIKE_PAIRS_SHARE = 0.5
# Before any training, the loss on training rows is this many nats, and this many times, above that
# on held-out rows: a first batch of eight rows varies by less.
LOSS_GAP_OF_ROWS, LOSS_FACTOR_OF_ROWS = 0.5, 2.0
# Success in training minus that on the exam (held-out tasks): more than sampling and chance make.
LARGE_HELDOUT_GAP = 0.3
# If this share of the exam is solved, its wording is no obstacle.
HELDOUT_LEARNT_SHARE = 0.5
# If the training loss fell to this part of its first value, the rows were learnt from.
LEARNT_LOSS_PART = 0.6

# --- alerts ---------------------------------------------------------------------------------

# Steps in a row that must agree before an alert is raised (one step if the alert rests on an
# evaluation, as `below_start` does), and before it counts as cleared.
STEPS_TO_RAISE = 2
STEPS_TO_CLEAR = 5
