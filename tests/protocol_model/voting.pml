/* Votes, receipts, the commit and the outcome query. */

#ifdef COORDINATOR
#define SENT_TO(i, k) (to_all[k] || planner_of[i] == (i))
#else
#define SENT_TO(i, k) true
#endif

/* A vote arrives, also that of an island that has died or gone on since. Only this plan's votes
 * count. */
#ifdef ANY_PLAN
#define OF_PLAN(i, k) (joined[attempt[i] * N + (k)] != 0)
#else
#define OF_PLAN(i, k) SAME_PLAN(i, k)
#endif
#ifdef COORDINATOR
#define CAME_ALONE(i, k) (to_all[i] || planner_of[i] == (k))
#else
#define CAME_ALONE(i, k) true
#endif

/* The receipt of an island that can be lost no more comes at once: that saves states and changes
 * no outcome. */
#define STAYS(k) (!HAS(MORTAL, k) || (crashes == CRASHES && freezes == FREEZES))
inline hear(i, k) {
    heard[AT(i)] = heard[AT(i)] | BIT(k);
    printf("island %d has the vote of %d\n", i, k);
    if
    :: STAYS(i) && CAME_ALONE(k, i) && attempt[k] == attempt[i] && state[k] == VOTING
        -> receipts[k] = receipts[k] | BIT(i)
    :: else
    fi
}
/* A vote that comes during the reduce counts from the island's own vote on. How early a vote is
 * heard matters where islands stand still. */
#if FREEZES > 0
#define HEARS(i) (state[i] == REDUCING || state[i] == VOTING || state[i] == ASKING)
#else
#define HEARS(i) (state[i] == VOTING || state[i] == ASKING)
#endif
#define HEAR(k) \
    :: atomic { !GONE(i) && HEARS(i) && k != i && NEEDS(i, k) \
                && IN_PLAN(i, k) && !HOLDS_VOTE(i, k) && VOTE_HEARD(i, k) != 0 \
                && OF_PLAN(i, k) && SENT_TO(i, k) \
                -> hear(i, k) }

/* The receipt of island k arrives. Mutation: k acknowledges votes of attempts that it has left,
 * too. */
#define ACKNOWLEDGED(i, k) HAS(heard[attempt[i] * N + (k)], i)
#define RECEIVE(k) \
    :: atomic { !GONE(i) && state[i] == VOTING && k != i && IN_PLAN(i, k) \
                && !HAS(receipts[i], k) && SAME_PLAN(i, k) && CAME_ALONE(i, k) \
                    && ACKNOWLEDGED(i, k) \
                -> receipts[i] = receipts[i] | BIT(k); \
                    printf("island %d has the receipt of %d\n", i, k) }

#ifdef NO_RECEIPTS
#define ALL_RECEIPTS(i) true
#else
#define ALL_RECEIPTS(i) ALL(RECEIPT, i)
#endif
#ifdef OPEN_MAY_COMMIT
#define FREE(i) true
#else
#define FREE(i) (!bound[i])
#endif
#ifdef COMMIT_BY_MAJORITY
#define VOTES_AGREE(i) (vote[AT(i)] != NO && !ANY(MISSING, i))
#define MISSING(i, k) (IN_PLAN(i, k) && !HOLDS_VOTE(i, k))
#else
#define VOTES_AGREE(i) CERTIFIED(i)
#endif

/* Mutation: a planner that writes to all commits before all others. */
#ifdef COORDINATOR
#include "coordinator.pml"
#ifdef PLANNER_ALONE
#define WAITS_FOR_FIRST(i) false
#else
#define WAITS_FOR_FIRST(i) (P(i) == i && SIZE(PLAN(i)) > 1 && !ANY(HAS_COMMITTED, i))
#endif
#define DIRECT(i) ((to_all[i] || SIZE(PLAN(i)) == 1) && !WAITS_FOR_FIRST(i))
#else
#define THROUGH_PLANNER
#define DIRECT(i) true
#endif

/* The code's rule: whoever takes a participant for lost asks before it commits, also if nothing
 * of it is missing. */
#ifdef LOSS_BINDS
#define LOSE(k) :: atomic { !GONE(i) && (state[i] == REDUCING || state[i] == VOTING) && !bound[i] \
    && k != i \
                            && IN_PLAN(i, k) && LOST(i, k) && !(state[i] == VOTING && DIRECT(i) \
                                && CERTIFIED(i) && EVERY(RECEIPT, i)) \
                            -> bound[i] = 1; printf("island %d takes %d for lost\n", i, k) }
#else
#define LOSE(k)
#endif

#define VOTE EACH(HEAR) EACH(RECEIVE) EACH(LOSE) THROUGH_PLANNER \
    :: atomic { !GONE(i) && state[i] == VOTING && FREE(i) && DIRECT(i) && VOTES_AGREE(i) \
        && ALL_RECEIPTS(i) -> commit(i) } \
    :: atomic { !GONE(i) && state[i] == VOTING && (vote[AT(i)] == NO || ANY(DISAGREES, i)) \
        -> abort_attempt(i) } \
    :: atomic { !GONE(i) && state[i] == VOTING && vote[AT(i)] != NO && (ANY(MISSES, i) \
        || bound[i]) \
                -> state[i] = ASKING; forget_liar(i); forget_votes(i); forget_heard(); \
                    printf("island %d asks for the outcome\n", i) }

/* The outcome query: who has committed shows its certificate; the others say "open" and are
 * bound by it. */
#define SHOWS(i, k) (state[k] == COMMITTED && attempt[k] == attempt[i] && SAME_PLAN(i, k))
#define QUERY(k) \
    :: atomic { !GONE(i) && state[i] == ASKING && k != i && IN_PLAN(i, k) && !GONE(k) && !LIES(k) \
                && SHOWS(i, k) -> commit(i) } \
    :: atomic { !GONE(i) && state[i] == ASKING && k != i && IN_PLAN(i, k) && !GONE(k) && !LIES(k) \
                && !SHOWS(i, k) && !HAS(answers[i], k) -> say_open(i, k) }

#define HAS_ABORTED(i, k) (!SAME_PLAN(i, k) || HAS_LEFT(i, k))
inline say_open(i, k) {
    answers[i] = answers[i] | BIT(k);
    if
    :: HAS_ABORTED(i, k) -> refused[i] = 1; printf("island %d says abort to %d\n", k, i)
    :: else -> bound[k] = (state[k] != ASKING); printf("island %d says open to %d\n", k, i)
    fi
}
#ifdef LIAR
/* A liar has a certificate only if all others have signed the same. Mutation: a "commit" without
 * one counts. */
#define SIGNED(i, k) (!IN_PLAN(i, k) || LIES(k) || (SAME_PLAN(i, k) \
    && vote[attempt[i] * N + (k)] == vote[AT(i)]))
#ifdef BELIEVE_COMMIT
#define PROVES(i) true
#else
#define PROVES(i) (ALL(SIGNED, i) && vote[AT(i)] != NO)
#endif
#define LIAR_SHOWS \
    :: atomic { !GONE(i) && state[i] == ASKING && IN_PLAN(i, LIAR) && PROVES(i) -> commit(i) }
#else
#define LIAR_SHOWS
#endif

/* Nobody has shown a certificate. */
#ifdef HELD_CERTIFICATE
#define ASK_ENDS_WELL(i) (CERTIFIED(i) && !refused[i])
#else
#define ASK_ENDS_WELL(i) false
#endif
#define ASK_END \
    :: atomic { !GONE(i) && state[i] == ASKING && ALL(ANSWERED, i) && ASK_ENDS_WELL(i) \
        -> commit(i) } \
    :: atomic { !GONE(i) && state[i] == ASKING && ALL(ANSWERED, i) && !ASK_ENDS_WELL(i) \
        -> abort_attempt(i) }
/* Another is lost: who has said "open" may have heard from it that it has committed. */
#ifdef NO_ASKING_AGAIN
#define ASK_AGAIN(k)
#else
#define ASK_AGAIN(k) \
    :: atomic { !GONE(i) && state[i] == ASKING && k != i && IN_PLAN(i, k) && GONE(k) \
                && !HAS(known_lost[i], k) \
                -> known_lost[i] = known_lost[i] | BIT(k); answers[i] = 0; \
                    printf("island %d finds %d lost\n", i, k) }
#endif
#define ASK EACH(QUERY) EACH(ASK_AGAIN) LIAR_SHOWS ASK_END
