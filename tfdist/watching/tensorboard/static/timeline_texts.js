// SPDX-License-Identifier: Apache-2.0
// Texts around the timeline: sums of a worker, names that fit, and the legend.

import {element, digits, percent, secs} from './format.js';

// What is zero is left out, but for the gradients that were accepted.
export function rows(sums, length) {
  const share = value => `${secs(value)} (${percent(value / length)})`;
  const counted = value => (Math.abs(value - Math.round(value)) < 0.01 ? String(Math.round(value)) : `about ${digits(value)}`);
  const wasted = sums.dropped_secs + sums.lost_secs;
  const found = [
    ['waiting for input', sums.input_secs, share], ['computing, accepted', sums.accepted_secs, share],
    ['computing, dropped', wasted, share], ['waiting for others', sums.wait_secs, share],
    ['in the all-reduce', sums.reduce_secs, share], ['held back', sums.held_secs, share],
    ['accepted', sums.accepted, counted], ['late and dropped', sums.dropped, counted], ['lost', sums.lost, counted],
    ['mean staleness', sums.accepted > 0.01 ? sums.staleness_sum / sums.accepted : 0, digits],
  ];
  return found.filter(([name, value]) => value > 1e-6 || name === 'accepted').map(([name, value, text]) => [name, text(value)]);
}

export function fitting(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let length = Math.min(text.length, 40);
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return `${text.slice(0, length)}…`;
}

// Categories of the bars; those of which the training has none (`sums` by channel) are left out.
export function legend(sums) {
  const entries = [
    ['input', 'waiting for input', sums.input_secs], ['accepted', 'computing, accepted', sums.accepted_secs],
    ['dropped', 'computing, late and dropped', sums.dropped_secs], ['wait', 'waiting for the other workers', sums.wait_secs],
    ['reduce', 'all-reduce', sums.reduce_secs], ['held', 'held back before the next start', sums.held_secs],
    ['lost', 'lost', sums.lost],
  ];
  // Less than a pixel of the whole timeline is none.
  const least = 1e-4 * Object.entries(sums).reduce((sum, [name, value]) => sum + (name.endsWith('_secs') ? value : 0), 0);
  return entries.filter(([name, , sum]) => sum > (name === 'lost' ? 0 : least)).map(([name, text]) =>
    element('li', {}, [element('span', {class: `swatch ${name}`, 'aria-hidden': 'true', text: name === 'lost' ? '✕' : ''}),
      element('span', {text})]));
}

// Kinds of events: the text of a label, and how much it matters where labels don't all fit.
export const KINDS = [
  ['lost', 0], ['returned', 1], ['policy', 1], ['phase', 1], ['resumed', 1], ['restarted', 1], ['validation', 2], ['checkpoint', 3], ['end', 3],
];

// Draws labels of events into a row, the important ones first; those that would overlap are left out.
export function labels(events, place, width, widthOf, draw) {
  const taken = [];
  const important = [...events].sort((one, other) => (KINDS[one.kind]?.[1] ?? 3) - (KINDS[other.kind]?.[1] ?? 3) || one.time - other.time);
  for (const event of important) {
    const text = KINDS[event.kind]?.[0] ?? 'event', half = widthOf(text) / 2 + 4;
    const middle = Math.min(width - half, place(event.time + event.secs / 2));
    if (taken.some(each => Math.abs(each.middle - middle) < each.half + half)) continue;
    taken.push({middle, half});
    draw(text, middle);
  }
}
