// SPDX-License-Identifier: Apache-2.0
// The panel that says which number of spares and workers would be best; hidden where a replay can't tell.

import {getJson} from './api.js';
import {element, empty, count, digits, short} from './format.js';

export class Advice {
  constructor() {
    this.list = element('div', {id: 'advice', 'aria-live': 'polite'});
    this.root = element('section', {'aria-label': 'Advice', class: 'advice', hidden: ''}, [
      element('h2', {text: 'Would other spares, or fewer workers, help?'}), this.list,
    ]);
  }

  clear() {
    this.shown = null;
    this.root.hidden = true;
  }

  async load(job) {
    if (this.shown === job.id + job.updates) return;
    const mine = this.shown = job.id + job.updates;
    const answer = await getJson('advice', {job: job.id}).catch(() => ({state: 'none'}));
    if (mine !== this.shown) return;
    this.list.dataset.state = answer.state;
    this.root.hidden = answer.state !== 'ready';
    if (answer.state === 'ready') this.show(answer);
  }

  show({text, cases, measured, updates}) {
    const names = ['', 'Workers', 'Spares', 'Updates/s', 'Gradients/s'];
    const rows = cases.map(each => element('tr', {class: each.chosen ? 'chosen' : ''}, [
      each.now ? 'as it ran' : '', each.workers, each.spares ?? '', digits(each.updates), digits(each.gradients),
    ].map(value => element('td', {text: String(value)}))));
    empty(this.list).append(
      element('p', {class: 'words', text: text.slice(0, 1).toUpperCase() + short(text.slice(1), 200)}),
      element('table', {}, [
        element('thead', {}, [element('tr', {}, names.map(name => element('th', {text: name, scope: 'col'})))]),
        element('tbody', {}, rows)]),
      element('p', {class: 'hint', text: `Replayed from the gradients of ${count(updates, 'update')}, the fastest workers ` +
        `first; the run made ${digits(measured)} updates per second. Fewer gradients in an update may need more updates.`}));
  }
}
