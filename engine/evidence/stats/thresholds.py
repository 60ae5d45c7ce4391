"""When a detector speaks: every threshold of `diagnose` and of alerts, each with its reason.

Start values came from a survey of failed runs; they were then settled on synthetic runs of seeds
that no test uses, and on real runs of the built-in model (tests/evidence).
"""

from envs.audit import verdict as audit_verdict

# --- windows --------------------------------------------------------------------------------

# Ten steps of usual size (16 tasks, 8 answers) are 1,280 answers: a share is known to a point or
# two, and no run has spent much by then.
WINDOW = 10
# With fewer steps than this a mean is noise. Five are enough to tell before `no_signal` ends a run
# at ten.
LEAST = 5
# A trend is the last third of the steps against the first; below this many steps, thirds are noise.
TREND_STEPS = 18
# Standard errors between two thirds that count as moved: at 3 a flat curve passes for a trend in
# one of several hundred tests, and a run is tested after every step.
TREND_Z = 3.0
# Evidence that a curve rises only excuses a run, so it need not be as strong as what accuses one.
RISING_Z = 2.0
# A share of bad answers that fell to this part of its start is being mended by the training...
MENDING = 0.6
# ...unless it is still above this: such a run needs the advice all the same.
TOO_MUCH_TO_WAIT = 0.3
# A share of solved answers that rose this much (and by `TREND_Z`) is learning.
LEARNING_GAIN = 0.1

# --- groups ---------------------------------------------------------------------------------

# Share of groups with a gradient below which a step is a random walk: 16 tasks leave under five.
EFFECTIVE_LOW = 0.3
# Below this GRPO has next to nothing to select; the learnability probe says the same.
EFFECTIVE_NONE = 0.2
# Groups that are alike because they are all solved are what a run is for. Only those alike without
# being solved count as a trouble, and it takes this many.
UNSOLVED_FLAT = 0.4
# Different answers of a group, as a part of its size: below it "alike" means the same text.
ALIKE_IN_GROUP = 0.25
# Solved answers at the two ends: hardly ever, nearly always.
SOLVED_NEVER = 0.05
SOLVED_ALWAYS = 0.95
# A share of held-out tasks once solved, at the start or later, that tells from "too hard": twice
# what a model that never solves one gets by luck, and more than the noise of twenty tasks.
SOLVED_ONCE = 0.15
# Answers earning one and the same reward: above it groups are on a plateau, not spread out.
ON_PLATEAU = 0.6
# Groups whose every answer is right: above it nothing is left to learn from; where the exam is
# solved too, above the second.
ALL_SOLVED = 0.95
MOSTLY_SOLVED = 0.75
# So many steps of that are worth a word: fewer end by themselves.
SOLVED_STEPS = 15
# So much less is solved of the held-out tasks where those trained on are all solved.
EXAM_BEHIND = 0.15
# Groups this small miss differences that a usual group shows; and the usual size.
SMALL_GROUP, USUAL_GROUP = 4, 8
# Entropy this far below its start leaves one or two words to choose from at a token.
ENTROPY_LEFT = 0.3
# A start below this (nats per token) is not exploration that could be lost.
ENTROPY_FROM = 0.05
# Steps after the fall before "and nothing came of it" can be concluded.
ENTROPY_FLAT_STEPS = 10
# So few steps are the first ones: a step that takes exploration at once was too large.
ENTROPY_EARLY = 5
# A run that took this part of the way to solving everything lost its entropy to learning.
WAY_GONE = 0.5

# --- answers --------------------------------------------------------------------------------

# One answer in ten cut: the reward of the rest no longer tells what is meant.
TRUNCATED = 0.1
# A cut answer that earns this part of the mean is paid like any other: length costs it nothing...
CUT_PAYS = 0.9
# ...if it earns this part at least of what the start earned: where all are cut and none is paid,
# cut ones earn the mean too.
CUT_PAYS_SOMETHING = 0.2
# Reference answers within this part of `max_tokens` fit easily: more room is not what is missing.
GOLD_FITS = 0.5
# Room for a reference answer that does not fit: the settings' own default is twice its length.
ROOM_FOR_GOLD = 2
# Held-out answers below which a share is not worth a finding (a tenth of 20 is two).
FEWEST_ANSWERS = 20
# Part of `max_tokens` that the median think block takes; above it answers are cut at the next rise.
THINK_BUDGET = 0.7
# Think blocks in fewer answers than this are an accident.
THINKING_AT_ALL = 0.3
# Repeated four-grams: twice what the base does, and a quarter of the text, which prose does not
# reach (prose of the built-in and of common chat models stays below a tenth).
REPEATED_TIMES = 2.0
REPEATED = 0.25
# A base that repeats half of its text does so without any training.
REPEATED_FROM_START = 0.5
# Answers the scorer could not read. At one in ten the reward is about form, not about the task.
UNPARSED = 0.1
# Of the answers wrapped in a fence or a phrase, this much less pay than of the bare ones.
WRAPPED_PAYS = 0.5
# Below this share of readable answers no reward teaches the form: show it.
PARSED_NEVER = 0.3

# --- rewards --------------------------------------------------------------------------------

# Failed scores: above it no verdict is given either (stats.MAX_ERROR_SHARE).
REWARD_ERRORS = 0.05
# Answers that another env process pays otherwise: what the audit tolerates of a scorer...
RESCORED = audit_verdict.UNSTABLE
# ...but of so few that one is no share: an answer may be random itself, as a program that draws is.
RESCORED_LEAST = 2
# ...and where a network is allowed, so that a judge outside may have changed its mind: a quarter of
# 24 are six, and that two fresh processes agree on more than six by chance is under one in 100.
RESCORED_OUTSIDE = 0.25
# Scoring above half of the step, and at least this many seconds: below it nobody waits.
SLOW_SHARE = 0.5
SLOW_SECONDS = 1.0
# A judge's metric (0..1) that counts as pleased; a hard check's that counts as failed.
JUDGE_HIGH = 0.7
CHECK_LOW = 0.3
# Pleased judge, failed check. Judges that agree with people still err on about a tenth.
JUDGE_GAP = 0.15
# Signals of an exploit: answers half as long again or a third shorter...
LENGTH_UP, LENGTH_DOWN = 1.5, 0.67
# ...the same text for different tasks, risen by this much; where success followed the reward it
# must be more than what labels of like weight come to (two give 0.5, or more when they are uneven).
ALIKE, ALIKE_RISE = 0.4, 0.3
ALIKE_THOUGH_SOLVED = 0.7
# ...the form paid in full while nothing more is solved.
FORM_FULL, FORM_RISE = 0.9, 0.2
# A share of solved answers that moved less than this, or less than this part of what the reward
# moved by (of its own top), did not follow the reward.
SUCCESS_FOLLOWS = 0.05
FOLLOWS_PART = 0.3
# A reward that lost less than this part of what success lost was content with the fall.
HELD_PART = 0.5
# A reward that lost this part of its start, by so many standard errors, fell: a run is tested after
# every step, and an alert needs two in a row.
REWARD_LOST = 0.25
FALL_Z = 2.5
# Steps at the beginning of a run, and at its end, whose rewards are compared.
FALL_FROM, FALL_TO = 2, 3
# Wrong answers that came to earn this part of what right ones earn (the audit's measure of a risk);
# and the part of the reward's rise that is not for becoming right: half of it is no by-product.
WRONG_PAYS = 0.5
UNEARNED = 0.5
# Signals needed. One alone has innocent reasons: answers get shorter, forms get learnt.
HACKING_SIGNALS = 2

# --- learning -------------------------------------------------------------------------------

# Evaluations in a row with a higher held-out loss, and how much higher than the lowest: three
# rises in a row by chance are one in eight, and half a percent of loss is rounding.
OVERFIT_EVALS = 3
OVERFIT_RISE = 0.02
# Held-out success that rose by this much since then, and beyond its noise: success decides.
OVERFIT_SUCCESS = 0.03
# Passes over the rows from which a run learns them by heart.
MANY_PASSES = 10
# Nothing solved, and the held-out loss fell by this part in the second half of its evaluations:
# a loss that has come to rest moves by less, and where one still falls the words come after it.
STILL_FALLING = 0.1
# Nothing solved, and the held-out loss fell all the way but by less than this part of its start:
# the steps are too small. At a usual rate the first dozen take more.
SLOW_FALL = 0.2
# AdamW moves a weight by at most about the learning rate per step, so the sum over the steps
# bounds every weight's way. Within 1e-4 an adapter answers as before.
FARTHEST_MOVE = 1e-4
# A gradient norm below this is none.
NO_GRADIENT = 1e-8
# Spike: against the median of the steps before it, and above what is clipped anyway.
SPIKE = 10.0
SPIKE_MEMORY = 20
# A loss of the rows at so many times its first value, and so many nats above it, is no noise of
# batches: the model that answered them is gone.
EXPLODED, EXPLODED_BY = 3.0, 2.0
# Of SFT at the default rate the loss of a new form soars within the warm-up and is below its first
# value after 10 to 20 steps; the run then ends well.
EXPLODED_FOR = 20
# One spike that clipping catches is harmless; this many, or one with a fall after it, are not.
SPIKES = 3
# Divergence per token (nats) below which a jump is no jump.
KL_FLOOR = 0.1

# --- rows ---

# Training rows that contradict another row: one in ten, as for rows that are cut.
CONTRADICTED = 0.1
# Pairs that a policy came to prefer as they are written: it has learnt from them.
PAIRS_LEARNT = 0.7
# Training rows that are copies of others: half of them is no accident of a few common questions.
COPIED = 0.5
# Pairs whose answers are alike: half of them leave too little to learn from.
PAIRS_ALIKE = 0.5
# A loss of the rows this much above that of the held-out ones, and so many times it, before any
# training: a first batch of eight rows varies by less.
ROWS_OFF, ROWS_OFF_TIMES = 0.5, 2.0
# Solved in training and not on the exam: more than sampling and chance come to.
EXAM_FAR_BEHIND = 0.3
# An exam solved to this share came along with what was trained, in whatever words.
EXAM_LEARNT = 0.5
# A loss of the rows that fell to this part of its first value was learnt from.
LOSS_LEARNT = 0.6

# --- alerts ---------------------------------------------------------------------------------

# Steps in a row that must agree before an alert is raised (one where it rests on an evaluation, as
# `below_start` does), and before it counts as cleared.
RAISE_AFTER = 2
CLEAR_AFTER = 5
