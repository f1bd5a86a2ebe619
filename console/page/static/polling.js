/** Polls while a run continues: at a bounded pace, and not while the page is hidden. */

const FASTEST_MS = 3_000;
const SLOWEST_MS = 15_000;
const READING_MS = 700;

/**
 * Asks again soon while the server is still reading the files that an answer is made of.
 * @param {Element} root asks no more once it left the page
 * @param {any} answer `indexed`: which part is read, 0 to 1
 * @param {() => Promise<void>} update
 */
export function askWhileReading(root, answer, update) {
  if (answer.indexed === undefined || answer.indexed >= 1) return;
  window.setTimeout(() => void (root.isConnected && update().catch(() => {})), READING_MS);
}

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
