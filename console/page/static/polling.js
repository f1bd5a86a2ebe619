/** Asks again while a run goes on: at a bounded pace, and not while nobody looks. */

const FASTEST_MS = 3_000;
const SLOWEST_MS = 15_000;

/**
 * Calls `ask` again and again: every 3 s while something changes, less often otherwise, never in a hidden tab.
 * @param {() => Promise<boolean>} ask whether something changed; must not throw
 */
export function startPolling(ask) {
  let wait_ms = FASTEST_MS;
  let timer = 0;
  let isAsking = false;

  async function turn() {
    timer = 0;
    if (document.hidden || isAsking) return;
    isAsking = true;
    try {
      wait_ms = (await ask()) ? FASTEST_MS : Math.min(SLOWEST_MS, wait_ms * 1.5);
    } finally {
      isAsking = false;
    }
    if (!document.hidden) timer = window.setTimeout(turn, wait_ms);
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!document.hidden) void turn();
  });
  timer = window.setTimeout(turn, wait_ms);
}
