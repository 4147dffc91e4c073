// SPDX-License-Identifier: Apache-2.0
// Colours: those of page.css, of the Okabe-Ito palette for categories, and viridis for amounts. Each has a second cue: a
// pattern, a height or a number.

const NAMES = [
  'accepted', 'dropped', 'wait', 'held', 'lost', 'input', 'reduce', 'lane', 'line', 'text', 'faint', 'pattern',
];
const VIRIDIS = [
  [68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141],
  [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37],
];

let palette = {};

export function colours() {
  return palette;
}

export function viridis(part) {
  const place = Math.max(0, Math.min(1, part)) * (VIRIDIS.length - 1);
  const low = Math.min(VIRIDIS.length - 2, Math.floor(place));
  return VIRIDIS[low].map((from, i) => Math.round(from + (VIRIDIS[low + 1][i] - from) * (place - low)));
}

// Follows TensorBoard's own setting (a class of the body around this frame), else that of the system.
export function followTheme(changed) {
  const system = matchMedia('(prefers-color-scheme: dark)');
  let around = null;
  try { around = parent !== window ? parent.document.body : null; } catch { /* another origin */ }
  const apply = () => {
    const isDark = around ? around.classList.contains('dark-mode') : system.matches, root = document.documentElement;
    root.dataset.theme = isDark ? 'dark' : 'light';
    const style = getComputedStyle(root);
    palette = Object.fromEntries(NAMES.map(name => [name, style.getPropertyValue(`--${name}`).trim()]));
    changed();
  };
  if (around) new MutationObserver(apply).observe(around, {attributeFilter: ['class']});
  system.addEventListener('change', apply);
  apply();
}
