/* Votes through the planner: a list of all votes, receipts for the list, and the word that all
 * have it. */

#define P(i) planner_of[i]
#define AT_PLANNER(i) (attempt[i] * N + P(i))
#define LISTS(i, k) (!IN_PLAN(i, k) || (HAS(heard[AT_PLANNER(i)], k) \
    && vote[attempt[i] * N + (k)] == YES))
#define HAS_LIST(i, k) (!IN_PLAN(i, k) || k == i || HAS(listed[i], k))
#define HAS_COMMITTED(i, k) (IN_PLAN(i, k) && k != i && SAME_PLAN(i, k) \
    && attempt[k] == attempt[i] \
                             && state[k] == COMMITTED)

/* The planner still waits for the receipts of its list. */
#define IS_AWAITED(i) (!HAS(listed[P(i)], i) && state[P(i)] == VOTING && !GONE(P(i)) \
    && attempt[P(i)] == attempt[i])
inline take_list(i) {
    printf("island %d has the list of votes\n", i);
    heard[AT(i)] = PLAN(i);
    if
    :: IS_AWAITED(i) -> listed[P(i)] = listed[P(i)] | BIT(i); receipts[P(i)] = receipts[P(i)] | BIT(i)
    :: else
    fi;
    forget_heard()
}

/* Mutation: the planner commits as soon as all have the list. */
#ifdef PLANNER_FIRST
#define PLANNER_MAY_COMMIT(i) (SIZE(PLAN(i)) > 1 && CERTIFIED(i) && ALL(HAS_LIST, i))
#else
#define PLANNER_MAY_COMMIT(i) (told_all[AT(i)] && ANY(HAS_COMMITTED, i))
#endif
/* Mutation: a planner that has answered "open" commits all the same. */
#ifdef PLANNER_IGNORES_OPEN
#define PLANNER_FREE(i) true
#else
#define PLANNER_FREE(i) FREE(i)
#endif
/* Mutation: the islands commit when the list comes. */
#ifdef COMMIT_ON_LIST
#define TOLD(i) true
#else
#define TOLD(i) told_all[AT_PLANNER(i)]
#endif

#define THROUGH_PLANNER \
    :: atomic { !GONE(i) && state[i] == VOTING && !to_all[i] -> to_all[i] = 1 } \
    :: atomic { !GONE(i) && (state[i] == VOTING || state[i] == ASKING) && P(i) != i \
        && ALL(LISTS, i) \
        && ((state[i] == VOTING && heard[AT(i)] != PLAN(i)) || IS_AWAITED(i)) \
                    -> take_list(i) } \
    :: atomic { !GONE(i) && state[i] == VOTING && FREE(i) && P(i) == i && SIZE(PLAN(i)) > 1 \
        && CERTIFIED(i) \
                && ALL(HAS_LIST, i) && !told_all[AT(i)] -> told_all[AT(i)] = 1; \
                    printf("planner %d says that all have the list\n", i) } \
    :: atomic { !GONE(i) && state[i] == VOTING && FREE(i) && P(i) != i && CERTIFIED(i) && TOLD(i) \
        -> commit(i) } \
    :: atomic { !GONE(i) && state[i] == VOTING && PLANNER_FREE(i) && P(i) == i \
        && PLANNER_MAY_COMMIT(i) -> commit(i) }
