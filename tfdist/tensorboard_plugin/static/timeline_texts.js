// SPDX-License-Identifier: Apache-2.0
// Texts around the timeline: sums of a worker, names that fit, and the legend.

import {element, digits, percent, secs} from './format.js';

export function rows(sums, length) {
  const share = value => `${secs(value)} (${percent(value / length)})`;
  const counted = value => (Math.abs(value - Math.round(value)) < 0.01 ? String(Math.round(value)) : `about ${digits(value)}`);
  return [
    ...(sums.input_secs ? [['waiting for input', share(sums.input_secs)]] : []),
    ['computing, accepted', share(sums.accepted_secs)], ['computing, dropped', share(sums.dropped_secs + sums.lost_secs)],
    ['waiting for others', share(sums.wait_secs)], ...(sums.reduce_secs ? [['in the all-reduce', share(sums.reduce_secs)]] : []),
    ['held back', share(sums.held_secs)],
    ['accepted', counted(sums.accepted)], ['late and dropped', counted(sums.dropped)], ['lost', counted(sums.lost)],
    ['mean staleness', sums.accepted > 0.01 ? digits(sums.staleness_sum / sums.accepted) : '-'],
  ];
}

export function fitting(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let length = Math.min(text.length, 40);
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return `${text.slice(0, length)}…`;
}

export function legend() {
  const entries = [
    ['input', 'waiting for input'], ['accepted', 'computing, accepted'], ['dropped', 'computing, late and dropped'],
    ['wait', 'waiting for the other workers'], ['reduce', 'all-reduce'],
    ['held', 'held back before the next start'], ['lost', 'lost'],
  ];
  return element('ul', {class: 'legend', 'aria-label': 'Legend'}, entries.map(([name, text]) =>
    element('li', {}, [element('span', {class: `swatch ${name}`, 'aria-hidden': 'true', text: name === 'lost' ? '✕' : ''}),
      element('span', {text})])));
}

