/* Gathering, the plan and the reduce. */

/* A plan no longer comes to island k in the attempt of island i, or k takes part in another
 * plan. */
#define CANNOT_JOIN(i, k) (!SAME_PLAN(i, k) && (attempt[k] > attempt[i] || state[k] >= COMMITTED \
                           || joined[attempt[i] * N + (k)] != 0 || PLANNER_GONE(i) || LIES(k)))
#define PLANNER_GONE(i) (planner_of[i] < N && GONE(planner_of[i]))

#define READY(i, k) (!GONE(k) && state[k] == GATHERING && attempt[k] == attempt[i] && !LIES(k))
/* The planner is the first by name of those that live, and takes a state that survives before it
 * plans. A liar that should plan and does not is passed over. */
#define PLANS_AFTER(i, k) (GONE(k) || LIES(k) || state[k] == STOPPED || ((k) >= (i) \
    && state[k] < COMMITTED))
#define MAY_PLAN(i) (ALL(PLANS_AFTER, i) && members[attempt[i] * PLANS + (i)] == 0)
#define READY_BIT(i, k) (READY(i, k) -> BIT(k) : 0)
#if N == 3
#define READY_SET(i) (READY_BIT(i, 0) + READY_BIT(i, 1) + READY_BIT(i, 2))
#else
#define READY_SET(i) (READY_BIT(i, 0) + READY_BIT(i, 1) + READY_BIT(i, 2) + READY_BIT(i, 3))
#endif

/* The planner fixes the plan. That the grace has run out is an event that can come at any time. */
inline make_plan(i) {
    printf("island %d plans attempt %d with the set %d\n", i, attempt[i], READY_SET(i));
    members[attempt[i] * PLANS + (i)] = READY_SET(i);
#ifdef LIAR
    if
    :: members[attempt[i] * PLANS + (i)] = members[attempt[i] * PLANS + (i)] | BIT(LIAR)
    :: true
    fi
#endif
}

inline take_part(i, planner, number) {
    attempt[i] = number;
    planner_of[i] = planner;
    joined[AT(i)] = (planner) + 1;
    state[i] = REDUCING;
    forget_attempts();
    printf("island %d takes part in the plan of %d for attempt %d\n", i, planner, number)
}

/* A plan arrives from a planner that lives. Plans of earlier attempts are refused. */
#define OFFERED(i, p, a) (members[(a) * PLANS + (p)] != 0 && HAS(members[(a) * PLANS + (p)], i))
#define ACCEPT_AT(p, a) \
    :: atomic { !GONE(i) && state[i] == GATHERING && (a) >= attempt[i] && joined[(a) * N + i] == 0 \
                && !GONE(p) && OFFERED(i, p, a) -> take_part(i, p, a) }
#if A == 1
#define ACCEPT(p) ACCEPT_AT(p, 0)
#elif A == 2
#define ACCEPT(p) ACCEPT_AT(p, 0) ACCEPT_AT(p, 1)
#elif A == 3
#define ACCEPT(p) ACCEPT_AT(p, 0) ACCEPT_AT(p, 1) ACCEPT_AT(p, 2)
#elif A == 4
#define ACCEPT(p) ACCEPT_AT(p, 0) ACCEPT_AT(p, 1) ACCEPT_AT(p, 2) ACCEPT_AT(p, 3)
#else
#define ACCEPT(p) ACCEPT_AT(p, 0) ACCEPT_AT(p, 1) ACCEPT_AT(p, 2) ACCEPT_AT(p, 3) ACCEPT_AT(p, 4)
#endif
#ifdef LIAR
#define ACCEPT_FROM_LIAR ACCEPT_SECOND(0)
#define ACCEPT_SECOND(a) \
    :: atomic { !GONE(i) && state[i] == GATHERING && (a) >= attempt[i] && joined[(a) * N + i] == 0 \
                && OFFERED(i, N, a) -> take_part(i, N, a) }
#else
#define ACCEPT_FROM_LIAR
#endif

/* A ready message of a higher attempt moves this island's attempt. */
#define CATCH_UP(k) \
    :: atomic { !GONE(i) && state[i] == GATHERING && !GONE(k) && !LIES(k) && state[k] == GATHERING \
                && attempt[k] > attempt[i] -> attempt[i] = attempt[k]; forget_attempts(); \
                    printf("island %d goes to attempt %d\n", i, attempt[i]) }
/* A state that survives is taken from an island that lives. */
#define TAKE(k) \
    :: atomic { !GONE(i) && state[i] == GATHERING && !GONE(k) \
                && (state[k] == COMMITTED || state[k] == TAKEN) -> state[i] = TAKEN; \
                    forget_attempts(); printf("island %d takes the state of %d\n", i, k) }

#define GATHER \
    :: atomic { !GONE(i) && state[i] == GATHERING && MAY_PLAN(i) && SIZE(READY_SET(i)) >= QUORUM \
        -> make_plan(i) } \
    EACH(ACCEPT) ACCEPT_FROM_LIAR EACH(CATCH_UP) EACH(TAKE)

/* The reduce ends well when every participant has sent its payload, and ends at once when one is
 * lost. */
#define PAYLOAD(i, k) (!IN_PLAN(i, k) || SAME_PLAN(i, k) || LIES(k))
#define NO_PAYLOAD(i, k) (IN_PLAN(i, k) && (GONE(k) || LIES(k) || CANNOT_JOIN(i, k)))

inline cast(i, what) {
    vote[AT(i)] = what;
    heard[AT(i)] = heard[AT(i)] | BIT(i);
    state[i] = VOTING;
    printf("island %d votes %d\n", i, what)
}

#ifdef LIAR
/* A liar that reduces a part can tell each island another mean. */
#define REDUCE_OF_LIAR :: atomic { !GONE(i) && state[i] == REDUCING && ALL(PAYLOAD, i) \
    && IN_PLAN(i, LIAR) \
                                   -> cast(i, YES_TO_OTHER) }
#else
#define REDUCE_OF_LIAR
#endif
#define REDUCE \
    :: atomic { !GONE(i) && state[i] == REDUCING && ALL(PAYLOAD, i) -> cast(i, YES) } \
    :: atomic { !GONE(i) && state[i] == REDUCING && ANY(NO_PAYLOAD, i) -> cast(i, NO) } \
    REDUCE_OF_LIAR
